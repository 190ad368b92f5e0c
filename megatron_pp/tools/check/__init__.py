"""`megatron-pp check`: finds errors, wrong numbers, waits and too little memory in a job before it is launched."""
