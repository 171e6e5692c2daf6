"""From the tensors of a checkpoint to the parameters of a model: the rules, the plan, and the loop that carries it out.

Tensors stream one by one, each straight into its place, so the peak is the model and one tensor. Matrices are packed for the
kernels in the format that they are stored in, where there is one for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from canter.checkpoint.tensors import StoredTensor, TensorSource
from canter.core.errors import CheckpointError
from canter.kernels.native.packed import packed_bytes
from canter.kernels.packed import BlockRows, PackedMatrix, PackedPart, allocate_packed
from canter.layers.build import Build, Matrix, Parameter, Use
from canter.layers.quant import MatrixWeights, PackOptions, Scheme, SelectedRows, StoredWeights

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) after each tensor."""

Transform = Callable[[Tensor], Tensor]
"""Gives a new tensor; of tensors without data (`meta`) too, since shapes are checked by it."""

_WHOLE = "weight"
"""The role of a tensor that is a weight by itself."""
_ALIGNMENT = 64
_MAX_NAMED = 3
_LOOKUP: set[Use] = {"lookup"}


@dataclass(frozen=True, slots=True)
class Rule:
    """Checkpoint tensor `source` fills parameter `target`, or one `part` of it; `{i}` in both stands for the layer.

    `tied`: when the model has no such parameter, because another lends its weights, the tensor is passed over; without
    it such a tensor is an error. `parts`: the tensor holds the rows of several parts, one part after the other, or where `grouped`
    those of each of the parameter's groups together. `transform`: what a dense parameter is of the stored tensor, in float32.
    """

    source: str
    target: str
    part: str | None = None
    tied: bool = False
    parts: tuple[str, ...] = ()
    grouped: bool = False
    transform: Transform | None = None


@dataclass(frozen=True, slots=True)
class WeightMap:
    """How a family's checkpoints name things.

    `renames`: (leading text, what replaces it), the first that fits, before the rules are looked up. `skip`: patterns
    (`*`, `?`) of names, as stored, that hold nothing for this model.
    """

    rules: tuple[Rule, ...]
    renames: tuple[tuple[str, str], ...] = ()
    skip: tuple[str, ...] = ()

    def rename(self, name: str) -> str:
        for old, new in self.renames:
            if name.startswith(old):
                return new + name[len(old) :]
        return name

    def skips(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.skip)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """`scheme`: how the checkpoint's matrices are quantised, None for floats and GGUF blocks. `keep_codes`: quantised weights are
    computed as they are stored, instead of being dequantised. `int8`: matrices of floats are rounded to int8 with a
    scale for every 32 elements of a row, Q8_0."""

    scheme: Scheme | None = None
    keep_codes: bool = True
    int8: bool = False


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a weight, or what a rule takes of it, goes: None for a tied one, which goes nowhere."""

    name: str
    parameter: Parameter | Matrix | None
    part: str | None
    rule: Rule

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all that the checkpoint stores together, once it is transformed."""
        if self.parameter is None:
            return ()
        shape = self.parameter.part_shape(self.part)
        return (sum(self.parameter.part_shape(part)[0] for part in self.rule.parts), *shape[1:]) if self.rule.parts else shape

    @property
    def rows(self) -> Tensor | None:
        """The rows of that which are this part's, in order; None for all."""
        if not self.rule.parts or self.parameter is None:
            return None
        groups = self.parameter.groups if self.rule.grouped else 1
        sizes = {part: self.parameter.part_shape(part)[0] // groups for part in self.rule.parts}
        before = sum(list(sizes.values())[: self.rule.parts.index(self.part or "")])
        starts = torch.arange(groups) * sum(sizes.values()) + before
        return (starts[:, None] + torch.arange(sizes[self.part or ""])).flatten()


@dataclass(slots=True)
class _Item:
    """The tensors of one weight, by role (see `Scheme.member`), and where it goes. `weights`: those of a matrix."""

    slot: _Slot
    members: dict[str, StoredTensor]
    weights: MatrixWeights | None = None


@dataclass(frozen=True, slots=True)
class _Panels:
    """Where in the arena a part's panels lie, and their format."""

    fmt: str
    group: int
    start: int
    nbytes: int
    num_elements: int


class LoadPlan:
    """Which tensors fill which parameters, and in which form: all of it known, and checked, before any weight is read.

    Raises `CheckpointError` for a tensor that is missing, unexpected, of the wrong shape or given twice: names it, what was
    expected and what was found.
    """

    def __init__(self, build: Build, weights: WeightMap, num_layers: int, source: TensorSource, options: LoadOptions) -> None:
        self._build, self._source, self._options = build, source, options
        self._pack_options = PackOptions(build.dtype, options.keep_codes, options.int8)
        slots = _expand(build.parameters, weights, num_layers)
        self._items = _gather(source, weights, slots, options.scheme)
        _require_all(slots, self._items)
        self._in_matrix: dict[int, dict[str | None, _Item]] = {}
        for item in self._items.values():
            self._prepare(item)
        self.bytes_by_format: dict[str, int] = {}
        self._rows: set[int] = set()
        self._panels: dict[tuple[int, str | None], _Panels] = {}
        self._arena_bytes = 0
        self._place()

    def _prepare(self, item: _Item) -> None:
        """Check an item's shape, and give a matrix's item its weights."""
        parameter = item.slot.parameter
        if parameter is None:
            return
        if isinstance(parameter, Matrix):
            item.weights = self._weights_of(item)
            found = item.weights.shape
            self._in_matrix.setdefault(id(parameter), {})[item.slot.part] = item
        else:
            found = _transformed_shape(_only(item), item.slot.rule.transform)
        if tuple(found) != item.slot.shape:
            name = next(iter(item.members.values())).name
            raise CheckpointError(f"Tensor {name!r}: expected shape {list(item.slot.shape)}, found {list(found)}.")
        rows = item.slot.rows
        if item.weights is not None and rows is not None:
            item.weights = SelectedRows(item.weights, rows)

    def _weights_of(self, item: _Item) -> MatrixWeights:
        scheme = self._options.scheme
        if scheme is None or set(item.members) == {_WHOLE}:
            return StoredWeights(_only(item))
        return scheme.weights(item.slot.name, item.members)

    def _place(self) -> None:
        """Decide each matrix's form; lay panels out in the order of the model, which is that of a step."""
        for parameter in self._build.parameters.values():
            if not isinstance(parameter, Matrix):
                self._count(str(parameter.tensor.dtype).removeprefix("torch."), parameter.nbytes)
                continue
            items = self._in_matrix[id(parameter)]
            if not self._build.packed:
                self._count(str(self._build.dtype).removeprefix("torch."), math.prod(parameter.shape) * self._build.dtype.itemsize)
            elif _stays_in_file(parameter, items):
                self._rows.add(id(parameter))
            else:
                for part in _parts(parameter, items):
                    self._place_part(parameter, part, items[part])

    def _place_part(self, matrix: Matrix, part: str | None, item: _Item) -> None:
        assert item.weights is not None
        fmt, group = item.weights.packed_format(self._pack_options)
        outputs, width = item.weights.shape
        nbytes = packed_bytes(fmt, outputs, width, group)
        self._panels[id(matrix), part] = _Panels(fmt, group, self._arena_bytes, nbytes, outputs * width)
        self._arena_bytes += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._count(fmt, nbytes)

    def _count(self, fmt: str, nbytes: int) -> None:
        self.bytes_by_format[fmt] = self.bytes_by_format.get(fmt, 0) + nbytes

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the weights take; all of them are read in a step that computes them."""
        return sum(self.bytes_by_format.values())

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step reads: all but tables of which only rows are looked up."""
        parameters = self._build.parameters.values()
        unread = [p for p in parameters if isinstance(p, Matrix) and p.uses == _LOOKUP and id(p) not in self._rows]
        return self.num_bytes - sum(self._bytes_of(matrix) for matrix in unread)

    def num_weights(self, use: Use) -> dict[str, int]:
        """Format -> weights of the matrices of a use, in the forms in which they are computed."""
        found: dict[str, int] = {}
        for matrix in self._build.parameters.values():
            if not isinstance(matrix, Matrix) or use not in matrix.uses:
                continue
            panels = [(panels.fmt, panels.num_elements) for (owner, _), panels in self._panels.items() if owner == id(matrix)]
            for fmt, count in panels or [(str(self._build.dtype).removeprefix("torch."), math.prod(matrix.shape))]:
                found[fmt] = found.get(fmt, 0) + count
        return found

    @property
    def file_bytes(self) -> int:
        """Bytes of the tables whose rows are used where they lie in the file."""
        return sum(_only(self._in_matrix[owner][None]).nbytes for owner in self._rows)

    def _bytes_of(self, matrix: Matrix) -> int:
        if not self._build.packed:
            return math.prod(matrix.shape) * self._build.dtype.itemsize
        return sum(panels.nbytes for (owner, _), panels in self._panels.items() if owner == id(matrix))

    def load(self, progress: Progress | None = None) -> None:
        """Read the weights, tensor by tensor, each straight into its place: the peak is the model and one tensor."""
        arena = allocate_packed(self._arena_bytes) if self._panels else None
        self._allocate(arena)
        total = sum(self._source.get(name).nbytes for name in self._source.names())
        done = 0
        last = {stored.name: item for item in self._items.values() for stored in item.members.values()}
        for item in self._items.values():
            self._fill(item, arena)
            for stored in item.members.values():
                if last[stored.name] is item:
                    self._source.release(stored.name)
                    done += stored.nbytes
            if progress is not None:
                progress(done, total)
        if progress is not None and done < total:
            progress(total, total)

    def _allocate(self, arena: Tensor | None) -> None:
        """Give every matrix its value, still to be filled."""
        for parameter in self._build.parameters.values():
            if not isinstance(parameter, Matrix):
                continue
            items = self._in_matrix[id(parameter)]
            if not self._build.packed:
                parameter.value = torch.empty(parameter.shape, dtype=self._build.dtype, device=self._build.device)
            elif id(parameter) in self._rows:
                stored = _only(items[None])
                parameter.value = BlockRows(stored.block_type or "", stored.data, parameter.shape)
            else:
                assert arena is not None
                parts = [self._packed_part(parameter, part, arena) for part in _parts(parameter, items)]
                parameter.value = PackedMatrix(tuple(parts))

    def _packed_part(self, matrix: Matrix, part: str | None, arena: Tensor) -> PackedPart:
        panels = self._panels[id(matrix), part]
        outputs, width = matrix.part_shape(part)
        return PackedPart(panels.fmt, outputs, width, panels.group, arena[panels.start : panels.start + panels.nbytes])

    def _fill(self, item: _Item, arena: Tensor | None) -> None:
        parameter, part = item.slot.parameter, item.slot.part
        if isinstance(parameter, Parameter):
            _fill_dense(parameter.part(part), _only(item), item.slot)
        elif isinstance(parameter, Matrix) and item.weights is not None and id(parameter) not in self._rows:
            if isinstance(parameter.value, Tensor):
                first, end = parameter.parts[part] if part is not None else (0, parameter.shape[0])
                item.weights.fill(parameter.value[first:end])
            else:
                assert arena is not None
                item.weights.pack(self._packed_part(parameter, part, arena))


def _transformed_shape(stored: StoredTensor, transform: Transform | None) -> tuple[int, ...]:
    if transform is None:
        return stored.shape
    try:
        return tuple(transform(torch.empty(stored.shape, device="meta")).shape)
    except (RuntimeError, IndexError) as error:
        raise CheckpointError(f"Tensor {stored.name!r}: shape {list(stored.shape)} does not fit here ({error}).") from None


def _fill_dense(out: Tensor, stored: StoredTensor, slot: _Slot) -> None:
    if slot.rule.transform is None and slot.rows is None:
        StoredWeights(stored).fill(out)
        return
    values = torch.empty(stored.shape)
    StoredWeights(stored).fill(values)
    if slot.rule.transform is not None:
        values = slot.rule.transform(values)
    out.copy_(values if slot.rows is None else values[slot.rows])


def _stays_in_file(matrix: Matrix, items: Mapping[str | None, _Item]) -> bool:
    """Whether rows are used where they lie: a table that is only looked up."""
    weights = items[None].weights if None in items else None
    return matrix.uses == _LOOKUP and isinstance(weights, StoredWeights) and weights.can_be_looked_up


def _parts(matrix: Matrix, items: Mapping[str | None, _Item]) -> list[str | None]:
    """The parts that the checkpoint gives a matrix in, in order: the whole where it stores the fused matrix."""
    return [None] if None in items else list(matrix.parts)


def _only(item: _Item) -> StoredTensor:
    """The one tensor of an item that is stored as it is."""
    if set(item.members) != {_WHOLE}:
        raise CheckpointError(f"Weight {item.slot.name!r}: expected one tensor of floats, found {', '.join(item.members)}.")
    return item.members[_WHOLE]


def _gather(
    source: TensorSource, weights: WeightMap, slots: Mapping[str, list[_Slot]], scheme: Scheme | None
) -> dict[tuple[str, str | None], _Item]:
    """(weight name, part) -> its tensors, in file order."""
    items: dict[tuple[str, str | None], _Item] = {}
    for stored_name in source.names():
        if weights.skips(stored_name):
            continue
        stored = source.get(stored_name)
        weight_name, role = (scheme.member(stored_name) if scheme else None) or (stored_name, _WHOLE)
        name = weights.rename(weight_name)
        if name not in slots:
            if scheme is not None and scheme.passes_over(stored):
                continue
            raise CheckpointError(f"Unexpected tensor {stored_name!r} of shape {list(stored.shape)}: the model has no place for it.")
        for slot in slots[name]:
            members = items.setdefault((name, slot.part), _Item(slot, {})).members
            if role in members:
                raise CheckpointError(f"Tensors {members[role].name!r} and {stored_name!r} both give {name!r}; expected one of them.")
            members[role] = stored
    return items


def _expand(parameters: Mapping[str, Parameter | Matrix], weights: WeightMap, num_layers: int) -> dict[str, list[_Slot]]:
    """Checkpoint name -> its slots, for the parameters that the model has."""
    slots: dict[str, list[_Slot]] = {}
    covered: set[tuple[str, str | None]] = set()
    for source, target, rule in _unrolled(weights.rules, num_layers):
        parameter = parameters.get(target)
        if parameter is not None and rule.parts:
            slots[source] = [_Slot(source, parameter, part, rule) for part in rule.parts]
            covered.update((target, part) for part in rule.parts)
        elif parameter is not None:
            slots[source] = [_Slot(source, parameter, rule.part, rule)]
            covered.update([(target, rule.part)] if rule.part else [(target, part) for part in (None, *parameter.parts)])
        elif rule.tied:
            slots[source] = [_Slot(source, None, None, rule)]
    for name, parameter in parameters.items():
        for part in parameter.parts or (None,):
            if (name, part) not in covered:
                raise CheckpointError(f"No rule fills {name!r}" + (f", part {part!r}." if part else "."))
    return slots


def _unrolled(rules: tuple[Rule, ...], num_layers: int) -> Iterator[tuple[str, str, Rule]]:
    for rule in rules:
        if "{i}" not in rule.source:
            yield rule.source, rule.target, rule
            continue
        for i in range(num_layers):
            yield rule.source.replace("{i}", str(i)), rule.target.replace("{i}", str(i)), rule


def _require_all(slots: Mapping[str, list[_Slot]], items: Mapping[tuple[str, str | None], _Item]) -> None:
    expected = {name: owners[0] for name, owners in slots.items() if owners[0].parameter is not None}
    given = {name for name, _ in items}
    missing = [name for name in expected if name not in given]
    if missing:
        named = ", ".join(f"{name!r} of shape {list(expected[name].shape)}" for name in missing[:_MAX_NAMED])
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise CheckpointError(f"The checkpoint lacks {named}{more}: expected {len(expected)} tensors, found {len(given)} of them.")
