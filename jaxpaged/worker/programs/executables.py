"""One compiled program as bytes and a record of plain values, and back, without tracing and without pickle.

`jax.experimental.serialize_executable` would do it with pickle. Here only the payload comes from XLA; what jax must
know to call it (shapes, shardings, which arguments XLA kept, the tree of the results) is a record that JSON can hold.
jax has no public function to put these together, so this is the one module that uses jax's internals, in the two
versions that we support. A payload is machine code: load it from a place that you trust like a program.

This module does not know what programs compute, nor where the bytes are kept, but for those that jax keeps itself: the
entries of its compilation cache, which a program can be loaded from by their keys.
"""

import threading
from collections.abc import Sequence
from typing import Any

import jax
import msgspec
from jax._src import compilation_cache
from jax._src.core import ShapedArray
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef, tree_structure

HIT = "/jax/compilation_cache/cache_hits"
"""What jax.monitoring calls a program that came from the compilation cache."""


class ArrayRecord(msgspec.Struct, frozen=True, array_like=True):
    """Shape, type and sharding of an argument or result. `spec` has the mesh axes of every array axis."""

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    mesh: tuple[tuple[str, int], ...] = ()

    def sharding(self, mesh: Mesh) -> NamedSharding:
        if self.mesh:  # another view of the same devices
            names, sizes = zip(*self.mesh)
            mesh = Mesh(mesh.devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
        axes = [names[0] if len(names) == 1 else names or None for names in self.spec]
        return NamedSharding(mesh, PartitionSpec(*axes))


class ProgramRecord(msgspec.Struct, frozen=True):
    """What jax must know of a program besides its machine code.

    `arguments` are all of them, flat; XLA dropped those whose index is not in `kept`. `in_tree` is the argument tree as
    a text, to compare. `out_tree` is the tree of the results: see `tree_record`.
    """

    name: str
    arguments: list[ArrayRecord]
    kept: list[int]
    in_tree: str
    results: list[ArrayRecord]
    out_tree: Any


class Unstorable(Exception):
    """A program uses something that a record cannot hold. The message says what."""


# ---- program -> bytes ----------------------------------------------------------------------------


def store(compiled: jax.stages.Compiled, node_types: Sequence[type]) -> tuple[bytes, ProgramRecord]:
    """The machine code of a program and its record. Results are trees of tuples, lists and `node_types`.

    Raises Unstorable.
    """
    record, parts = record_of(compiled, node_types), compiled._executable._unloaded_executable
    if isinstance(parts.xla_executable, xla_client.LoadedExecutable):
        try:
            return parts.backend.serialize_executable(parts.xla_executable), record
        except jax.errors.JaxRuntimeError as error:  # on a CPU, what sorts: experts without the extra
            raise Unstorable(f"XLA cannot write program {parts.name}: {error}") from None
    return parts.xla_executable.serialize(), record  # compiled for devices that are not here


def record_of(compiled: jax.stages.Compiled, node_types: Sequence[type]) -> ProgramRecord:
    """The record alone. Raises Unstorable."""
    parts = compiled._executable._unloaded_executable
    if parts.unordered_effects or parts.ordered_effects or parts.host_callbacks or parts.mut:
        raise Unstorable(f"program {parts.name} has side effects")
    if compiled._params.const_args or not parts.committed:
        raise Unstorable(f"program {parts.name} has constants as arguments, or no devices of its own")
    arguments = jax.tree.leaves(compiled.args_info)
    kept = sorted(parts.kept_var_idx)
    shardings: list[Any] = [None] * len(arguments)
    for i, sharding in zip(kept, parts.input_shardings, strict=True):
        shardings[i] = sharding
    record = ProgramRecord(
        name=parts.name,
        arguments=[array_record(leaf, sharding) for leaf, sharding in zip(arguments, shardings, strict=True)],
        kept=kept,
        in_tree=str(compiled.in_tree),
        results=[array_record(*pair) for pair in zip(parts.output_avals, parts.output_shardings, strict=True)],
        out_tree=tree_record(compiled.out_tree, {cls: name for name, cls in types_by_name(node_types).items()}),
    )
    if tree_of(record, node_types) != compiled.out_tree:
        raise Unstorable(f"results of program {parts.name} are a tree that cannot be made again: {compiled.out_tree}")
    return record


def array_record(array: Any, sharding: Any) -> ArrayRecord:
    """`sharding` is None for arguments that are not used."""
    spec: tuple[tuple[str, ...], ...] = ()
    view: tuple[tuple[str, int], ...] = ()
    if sharding is not None:
        if not isinstance(sharding, NamedSharding):
            raise Unstorable(f"an array {array} is placed by {sharding}, not by a named mesh")
        spec = tuple((axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in sharding.spec)
        view = tuple(sharding.mesh.shape.items())
    return ArrayRecord(tuple(array.shape), jax.numpy.dtype(array.dtype).name, spec, view)


def tree_record(tree: PyTreeDef, names: dict[type, str]) -> Any:
    """A tree as JSON values: "*" for a leaf, null for None, otherwise [name of the node's type, child, ...]."""
    if tree == tree_structure(0) or tree == tree_structure(None):
        return "*" if tree.num_leaves else None
    cls, _ = tree.node_data()
    if cls not in names:
        raise Unstorable(f"results hold a {cls.__name__}; name it among the node types")
    return [names[cls], *(tree_record(child, names) for child in tree.children())]


# ---- bytes -> program ----------------------------------------------------------------------------


class LoadedProgram:
    """A stored program. Its argument tree is known from its first call, which is checked against the record."""

    def __init__(self, executable: Any, record: ProgramRecord, out_tree: PyTreeDef):
        self.executable, self.record, self.out_tree = executable, record, out_tree
        self.compiled: jax.stages.Compiled | None = None

    def __call__(self, *args: Any) -> Any:
        if self.compiled is None:
            self.compiled = self._bind(args)
        return self.compiled(*args)

    def as_text(self) -> str:
        """Its optimised HLO."""
        return self.executable.as_text()

    def _bind(self, args: tuple[Any, ...]) -> jax.stages.Compiled:
        in_tree = tree_structure((args, {}))
        leaves = in_tree.flatten_up_to((args, {}))
        if str(in_tree) != self.record.in_tree:
            raise TypeError(f"{self.record.name} was compiled for {self.record.in_tree} and is called with {in_tree}")
        for i, (array, leaf) in enumerate(zip(self.record.arguments, leaves, strict=True)):
            if (leaf.shape, leaf.dtype) != (array.shape, array.dtype):
                given = f"{leaf.dtype}{list(leaf.shape)}"
                wanted = f"{array.dtype}{list(array.shape)}"
                raise TypeError(f"argument {i} of {self.record.name} is {given}; it was compiled for {wanted}")
        return jax.stages.Compiled(self.executable, [], in_tree.unflatten(leaves), self.out_tree, no_kwargs=True)


def load(payload: bytes, record: ProgramRecord, mesh: Mesh, node_types: Sequence[type]) -> LoadedProgram:
    """The program on the devices of `mesh`. Raises what XLA raises for a payload that it cannot use."""
    devices = xla_client.DeviceList(tuple(mesh.devices.flat))
    backend = mesh.devices.flat[0].client
    executable = backend.deserialize_executable(payload, executable_devices=devices)
    kept = [record.arguments[i] for i in record.kept]
    in_avals, out_avals = avals(kept), avals(record.results)
    in_shardings = tuple(array.sharding(mesh) for array in kept)
    layouts = pxla._get_layouts_from_executable(
        executable, (None,) * len(kept), (None,) * len(record.results), 0, in_avals, out_avals
    )
    parts = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=devices,
        backend=backend,
        name=record.name,
        committed=True,
        input_avals=in_avals,
        input_shardings=in_shardings,
        kept_var_idx=set(record.kept),
        output_avals=out_avals,
        output_shardings=tuple(array.sharding(mesh) for array in record.results),
        xla_in_layouts=layouts[0],
        xla_out_layouts=layouts[1],
        dispatch_in_layouts=pxla.get_dispatch_layouts(layouts[0], in_shardings, in_avals),
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        mut=None,
        all_args_info=None,
        pgle_profiler=None,
    )
    return LoadedProgram(parts.load(), record, tree_of(record, node_types))


def avals(arrays: Sequence[ArrayRecord]) -> tuple[ShapedArray, ...]:
    return tuple(ShapedArray(array.shape, jax.numpy.dtype(array.dtype)) for array in arrays)


def tree_of(record: ProgramRecord, node_types: Sequence[type]) -> PyTreeDef:
    return tree_structure(tree_example(record.out_tree, types_by_name(node_types)))


def tree_example(record: Any, types: dict[str, type]) -> Any:
    """Something with the tree of a record. Raises KeyError for a type that is not among `types`."""
    if record is None or record == "*":
        return None if record is None else 0
    name, *children = record
    parts = [tree_example(child, types) for child in children]
    cls = types[name]
    return cls(parts) if cls in (tuple, list) else cls(*parts)


def types_by_name(node_types: Sequence[type]) -> dict[str, type]:
    return {cls.__name__: cls for cls in (tuple, list, *node_types)}


# ---- what jax's compilation cache keeps ----------------------------------------------------------


class CacheEntries:
    """The entries of jax's compilation cache, by their keys, and which one a program was."""

    def __init__(self, client: Any):
        """`client`: that of the devices for which programs are compiled."""
        cache = compilation_cache._get_cache(client)
        if cache is not None and not isinstance(cache, WatchedCache):
            cache = compilation_cache._cache = WatchedCache(cache)
        self._cache = cache

    def compile(self, lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str | None]:
        """A program and the key of its entry; None if it has none."""
        if self._cache is None:
            return lowered.compile(), None
        self._cache.asked.key = None
        compiled = lowered.compile()
        return compiled, self._cache.asked.key

    def payload(self, key: str) -> bytes | None:
        """What `load` takes, of an entry that is there. Raises what decompressing raises."""
        found = None if self._cache is None else self._cache.whole.get(key)
        if found is None:
            return None
        payload, _ = compilation_cache.extract_executable_and_time(compilation_cache.decompress_executable(found))
        return payload


class WatchedCache:
    """A cache of jax's, which remembers for each thread the key that it was asked for last."""

    def __init__(self, whole: Any):
        self.whole, self.asked = whole, threading.local()

    def get(self, key: str) -> bytes | None:
        self.asked.key = key
        return self.whole.get(key)

    def put(self, key: str, value: bytes) -> None:
        self.whole.put(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)
