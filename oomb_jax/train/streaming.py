"""Arrays on their way to the disk: all copied to the host at once, or one after the other through one buffer."""

from collections.abc import Sequence

import jax
from orbax.checkpoint import future, type_handlers


class StreamingHandler(type_handlers.ArrayHandler):
    """orbax's handler of arrays, which copies all of them to the host before the save returns; but of more than `whole`
    bytes one at a time in the background, the next when the one before is written.

    orbax's own limit on such copies (`save_device_host_concurrent_gb`) does not bound the memory of the process: JAX
    keeps the host's copy of an array as long as the array lives.
    """

    def __init__(self, whole: int):
        """What is saved more than `whole` bytes must not change before the save is done."""
        # Where an array goes is told when it is restored.
        super().__init__(enable_write_sharding_file=False)
        self._whole = whole

    async def serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[type_handlers.ParamInfo],
        args: Sequence[type_handlers.SaveArgs] | None = None,
    ) -> Sequence[future.Future]:
        """Begins to write `values`."""
        if sum(x.nbytes for x in values) <= self._whole:
            return await super().serialize(values, infos, args)
        args = args or [type_handlers.SaveArgs()] * len(values)
        write = super().serialize

        async def one(*array) -> None:
            x, info, arg = array
            for written in await write([_another(x)], [info], [arg]):
                written.result()

        async def one_after_another() -> None:
            for array in zip(values, infos, args, strict=True):
                await one(*array)

        return [future.CommitFutureAwaitingContractedSignals(one_after_another(), name="streaming")]


def _another(x: jax.Array) -> jax.Array:
    """The same memory as an array of its own, with which the host's copy goes."""
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [x])
