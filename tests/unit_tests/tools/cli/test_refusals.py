"""Impossible command lines are refused in one line that names the fault. They leave no files behind."""

from __future__ import annotations

import os
import shlex
from string import Template

import pytest

from testkit.inputs.plan_text import rows
from tests.unit_tests.tools.cli.conftest import assert_refused

# Command line | parts of the error
REFUSED = """
plan -P -3 | '-3' is not a whole number from 1 & megatron-pp plan --help
plan --lookahead -1 | '-1' is not a whole number from 0
draw -s no_such_module:mine | no_such_module:mine: there is no module no_such_module in this folder
draw -s json:mine | schedule 'mine' is not known
plan -s 1f1b -V 3 | has 1 model chunk(s) a rank, not 3; leave -V out, or use a schedule with 3: interleaved_1f1b
plan --import nowhere.csv | nowhere.csv & cannot be read
plan --import nowhere.csv -P 4 | the plan of --import has its own pipeline size
plan -o plan.xyz | not as 'xyz'
plan -o no/such/folder/plan.csv | no/such/folder/plan.csv & cannot be written
simulate --forward-ms 3 | --forward-ms and --backward-ms go together
simulate --forward-ms 1,2 --backward-ms 1,2,3 | the same length; --forward-ms has 2, --backward-ms has 3
simulate -P 4 --forward-ms 1,2,3 --backward-ms 1,2,3 | times of 3 stages cannot be regrouped into 4
simulate --bandwidth 10 | --bandwidth needs the size of a message
simulate --layers 4 | also needs --hidden-size and --seq-length
simulate --layers 6 --hidden-size 8 --seq-length 8 | 6 layers do not divide over 4 stages
simulate --memory-limit 3 | --memory-limit is for --compare
simulate --compare 1f1b --memory-limit 3 | --memory-limit needs the shape of the model
simulate --compare 1f1b -s gpipe | --schedule does not go with --compare, which names the schedules
simulate --compare 1f1b,nonsense | 'nonsense' is not known
simulate --link 3-4:1 | --link 3-4 is not a link between two of the ranks 0 to 3
simulate --link 1-1:1 | --link 1-1 is not a link between two of the ranks 0 to 3
simulate -s 1f1b --link 0-2:1 | --link 0-2 has no effect
simulate -P 2 -V 1 -M 2 -s 1f1b --p2p-ms 1e308 | '1e308' is neither 0 nor a number from 1e-18 to 1e+18
report . -o report.svg | reports are written as .html, .png or .json, not as report.svg
simulate --link 3-4 | argument --link: '3-4' is not a link; write SRC-DST:MS or SRC-DST:MS:GB/S
simulate --link 0:1 | argument --link: '0:1' is not a link
simulate --link 0-1:x | argument --link: 'x' is neither 0 nor a number
advise -P 4 --gpu h1000 | 'h1000' is not known (did you mean h100?)
simulate -M 4,8 | -s, -V and -M name 2 plans, but this command needs one
simulate --from-trace . | there are no traces
draw -o plan.xyz | drawings are written as .svg, .html & not as '.xyz'
draw --width 19 | --width is 19; text needs at least 20
draw --width 200 -o plan.png | --width is 200; png needs at least 300
draw --style svg | needs a file to write to: -o FILE
draw --style grid -s naive -V 2 | schedule naive has 1 model chunk(s) a rank, not 2
report . | there are no traces
verify --p2p-ms 3 | is an option of simulate and advise and draw, not of verify & verify --help
plan --optimizer-bypass | --optimizer-bypass is an option of simulate, not of plan
verify extra | 'extra' is one argument too many
draw --step 3 | --step needs --from-trace
draw --dark | --dark is for & not text
draw -o a.html --width 900 | --width is not for html
draw --from-trace traces -P 4 | --pipeline-size does not go with --from-trace
simulate --from-trace traces --p2p-ms 1 | --p2p-ms does not go with --from-trace
simulate --compare 1f1b --weight-share 1 | --weight-share is for a single plan
simulate -s 1f1b --weight-share 1 | --weight-share is for separate weight gradients, but 1f1b has none
simulate --vocab-size 9 | also needs --layers and --hidden-size and --seq-length
simulate --sequence-parallel --layers 4 --hidden-size 8 --seq-length 8 | needs --tensor-parallel above 1
plan -s gpipe --group-size 2 | --group-size is for schedules with groups (interleaved_1f1b & not gpipe
plan --modules 'llm=0,1; vision' | 'vision' is neither a module, as llm=2,3, nor a bridge
plan --modules 'llm=0,1; llm=2' | module llm is there twice
plan --modules ';' | there is no module
plan --modules 'vision=0; vision>llm' | the topology names a module 'llm'
plan --modules 'a=0/1; b=2/3; a>b' | --modules has 2 pipelines without messages between them (ranks 0, 2: a 0>2
plan --modules 'a=0; b=1; a>b' -M 2,4 | -M has 2 numbers of microbatches; with --modules it needs one
plan --modules 'a=0; b=1; a>b' -P 2 | --pipeline-size does not go with --modules
plan --modules 'a=0; b=1; a>b' --format torch-csv | PyTorch's CSV has one line of stages, and this plan a graph of
verify --modules 'a=0; b=1; a>b' --keep-outputs | --keep-outputs does not go with --modules
simulate --modules 'a=0; b=1; a>b' --compare 1f1b | --modules does not go with --compare
draw --modules 'a=0; b=1; a>b' --style grid | --modules does not go with --style grid
plan --policy plain --lookahead 2 | --lookahead is for --policy overlap, not plain
plan --channels shared --lookahead 2 | --lookahead is for --channels one_way, not shared
plan --forward-only --grad-sync explicit | --grad-sync does not go with --forward-only
plan --param-sync | --param-sync needs several model chunks
plan --skip-cache all | --skip-cache needs --skip-tensors
plan -P 2 --skip-tensors a=0>2 | stage 2 uses it; only stages behind it may, up to 1
plan --list -P 4 | --pipeline-size does not go with --list
plan --compute-only --format json | --compute-only is for text, not json
plan --import whole.json --policy plain | --policy is plain, but the plan in whole.json was lowered with
plan --import comms.csv --policy plain | comms.csv: the file says itself where it sends & 'plain'
plan --import whole.json --device one_queue | --device has no effect on whole.json
plan -o '' | argument -o/--output: '' is not the name of a file
report '' | '' is not the name of a folder
simulate --megatron-args '' | '' has no argument of Megatron
simulate --megatron-args job | 'job' has no argument of Megatron; write arguments as --num-layers 32
report nowhere | nowhere: the folder does not exist, so there are no traces
report compute.csv | compute.csv: cannot be read (Not a directory)
plan -s 1F1B | is not known (did you mean 1f1b?)
plan -s zbv | is not known (did you mean zb_v?)
plan -s dualpipe | is not known (did you mean dualpipe_v?)
plan -s Interleaved1F1B | is not known (did you mean interleaved_1f1b?)
simulate --compare gpip,1f1b | is not known (did you mean gpipe?)
plan --policy batch | is not known (did you mean batched?)
plan --polcy batched | is not known (did you mean --policy?)
plan --device onequeue | is not known (did you mean one_queue?)
simualte | is not known (did you mean simulate?)
draw --style pgn | is not known (did you mean png?)
simulate --forward-ms=-1 --backward-ms 1 | is neither 0 nor a number from 1e-18
simulate --forward-ms=nan --backward-ms 1 | is neither 0 nor a number from 1e-18
simulate --forward-ms=inf --backward-ms 1 | is neither 0 nor a number from 1e-18
draw --style grid --from-trace traces | --from-trace does not go with --style grid
draw --style grid --run one | --run does not go with --style grid
draw --style grid --rank 1 | --rank does not go with --style grid
draw --style grid --step 0 | --step does not go with --style grid
plan -s compute.csv -P 3 | compute.csv is a schedule of 2 ranks, but -P is 3
plan -s compute.csv -V 2 | schedule compute.csv has 1 model chunk(s) a rank, not 2
plan -s compute.csv -M 8 | compute.csv is a schedule of 4 microbatches, but -M is 8
plan -s compute.csv --group-size 2 | --group-size is for schedules with groups
"""
# Behind ADVISE
NO_ADVICE = """
advise | the costs of the model are missing
advise $COSTS --gpu h100 $SIZES | give only one of them
advise --gpu h100 | needs the sizes of the model
advise --gpu h1000 $SIZES | did you mean h100
advise $COSTS --layers 0 | --layers is 0
advise $COSTS --loss-ms 1,1,1 | so the number of layers must be known
advise $COSTS --layers 8 --loss-ms 1,1 | it needs three, F,B,W
advise --forward-ms 1,2 --backward-ms 1,2,3 | lists must have the same length
advise --forward-ms 1 | go together
advise $COSTS --mtp-ms 1,1,1 | needs --mtp-layers
advise $COSTS --gated | needs --gpu
advise $COSTS --hidden-size 64 | needs --gpu
advise $COSTS --micro-batch-size 3 | cannot be made of microbatches of 3
advise $COSTS --micro-batch-size 0 | '0' is not a whole number from 1
advise $COSTS --plot x.gif | writes .svg and .png, not '.gif'
advise $COSTS --costs-per layer | needs --layers
advise $COSTS --run x | --from-trace
advise $COSTS --offload-bandwidth 0 | must be above 0
advise $COSTS --offload-ms 1,2 | must be one number above 0
advise $COSTS --offload-ms 1 --offload-bandwidth 1 | both give the time of a copy
advise $COSTS --output-ms 1 | --loss-ms
advise $COSTS --spread-mtp | needs --mtp-layers
advise $COSTS --schedules vocab_1f1b | splits the output layer with its loss, so the model needs an output layer
advise $COSTS --microbatch-costs 1,2,3 | costs of 3 microbatches are given, but a step has 8
advise $COSTS --data-parallel 0 | data_parallel is 0
advise $COSTS --link 0-9:1 | --link 0-9 is not a link between two of the ranks 0 to 3
advise $COSTS --bandwidth 0 | --bandwidth must be above 0
advise $COSTS --bandwidth 10 | --bandwidth needs the size of a message
advise $COSTS --attention-share 0.1 | --attention-share needs --sequence-slices above 1
advise $COSTS --attention-share 2 --sequence-slices 4 | the share of attention is 2
advise $COSTS --sequence-slices 0 | '0' is not a whole number from 1
advise $COSTS --schedules zb_h1 --no-split-backward | zb_h1 splits backwards, but the model cannot
advise $COSTS --schedules gis --max-chunks 1 | gis has 2 chunks a rank, but at most 1 are tried
advise $COSTS --schedules seq_1f1b | seq_1f1b needs slices of sequences, but --sequence-slices is 1
advise $COSTS --schedules pipe_offload | pipe_offload offloads, but the time of copies is not known
advise $COSTS --schedules '' | schedule '' is not known
advise $COSTS --plot none/front.svg | none/front.svg: cannot be written (No such file or directory)
advise $COSTS --measured-out / | /: cannot be written (Is a directory)
advise $SIZES --gpu h100 --gpu-bandwidth 1 | --gpu-bandwidth goes with --gpu-tflops
advise $SIZES --gpu h100 --gpu-efficiency 0 | the efficiency is 0
advise $SIZES --gpu h100 --attention-share 0.1 --sequence-slices 2 | does not go with --gpu
advise $SIZES --gpu-tflops 100 --gpu-bandwidth 0 | --gpu-bandwidth must be above 0
advise $SIZES --gpu h100 --gpu-link 0 | --gpu-link must be above 0
advise $SIZES --gpu h100 --gpu-network 0 | --gpu-network must be above 0
advise $SIZES --gpu h100 --encoder-layers 2 | --encoder-layers, --encoder-hidden-size, --encoder-seq-length go together
advise $COSTS --gpus-per-node 4 | needs --gpu
"""
ADVISE = "-P 4 --global-batch 8 --memory-gb 80 --jobs 1"
SHORT = {
    "COSTS": "--forward-ms 1 --backward-ms 1 --weight-ms 1 --activation-gb 2 --p2p-ms 0.1",
    "SIZES": "--layers 8 --hidden-size 64 --seq-length 64",
}


@pytest.mark.parametrize(("line", "words"), rows(REFUSED) + rows(NO_ADVICE))
def test_impossible_runs_are_reported_in_one_line(command, files, line, words):
    there = sorted(os.listdir())
    line = Template(line.replace("advise", f"advise {ADVISE}", 1) if line.startswith("advise") else line)
    assert_refused(command(*shlex.split(line.substitute(SHORT))), 2, *words.split(" & "))
    assert sorted(os.listdir()) == there
