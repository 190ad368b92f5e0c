"""Why a step does not go on: what is stalled and which ranks are the cause, in the words of errors."""
