"""The parts of `scripts/gpu_check.py`, which checks and measures on a machine with 1 to 8 GPUs.

table     the parts in order: deadline, requirements and work of each
runner    runs them one after the other, each in a process of its own, and keeps the results
page      the page made from the results
bench     the object that a part works with, and to which it gives its checks and tables
ranks     joins ranks to a process group, and compares their steps with one process
outside   processes, GPUs and nvidia-smi, which tests replace
parts/    a file for each subject
"""
