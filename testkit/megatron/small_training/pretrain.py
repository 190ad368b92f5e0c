"""A training script on the small `megatron.training`."""

from megatron.training.arguments import parse_args
from megatron.training.training import pretrain

if __name__ == "__main__":
    pretrain(parse_args())
