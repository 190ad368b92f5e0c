"""The parts of `scripts/gpu_check.py`: what is checked and measured on a machine with 1 to 8 GPUs.

table     the parts, in order: deadline, what each needs, its work
runner    runs them one after the other, each in a process of its own; keeps what is done
page      the page made from the results
bench     what a part's work gets, and where it writes its checks and tables
ranks     how ranks join a process group; steps that are compared with one process
outside   processes, GPUs and nvidia-smi: what a test replaces
parts/    a file for each subject
"""
