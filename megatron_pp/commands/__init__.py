"""The subcommands of ``megatron-pp``, one file each. None of them needs torch or a process group."""
