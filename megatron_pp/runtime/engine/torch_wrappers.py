"""Support for torch's DistributedDataParallel in a pipeline."""

from torch.nn.parallel import DistributedDataParallel

from megatron_pp.errors import ScheduleInputError


def check_follows_pipelines(number: int, chunk: DistributedDataParallel) -> None:
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(chunk, option, False):
            raise ScheduleInputError(
                f"model chunk {number} is wrapped as DistributedDataParallel({option}=True), which cannot follow "
                f"a pipeline; wrap it with {option}=False"
            )


def expect_gradients(wrapper: DistributedDataParallel) -> None:
    """The backward that follows reduces the gradients of ``wrapper``."""
    # torch reduces only the gradients of the last forward that ran outside of no_sync. In a pipeline that is
    # another microbatch's forward, so the gradients would stay local.
    wrapper.reducer.prepare_for_backward([])
