"""Options of the commands, and what they name: plans, costs, Megatron's settings, and a question to the advisor."""
