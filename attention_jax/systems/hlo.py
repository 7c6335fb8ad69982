"""Counts the traffic of a compiled program: bytes of device memory, and bytes between devices by kind of collective.

XLA's own cost analysis counts the body of a loop once. These counts multiply it by the number of its steps, which the
compiler records in the program (known_trip_count); a loop whose length depends on values counts once. All branches of a
conditional count.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

BYTES = {'pred': 1, 's4': 1, 'u4': 1, 's8': 1, 'u8': 1, 's16': 2, 'u16': 2, 'f16': 2, 'bf16': 2, 's32': 4, 'u32': 4}
BYTES |= {'f32': 4, 's64': 8, 'u64': 8, 'f64': 8, 'c64': 8, 'c128': 16}
BYTES |= dict.fromkeys(('f8e3m4', 'f8e4m3', 'f8e4m3fn', 'f8e4m3fnuz', 'f8e4m3b11fnuz', 'f8e5m2', 'f8e5m2fnuz'), 1)
BYTES |= {'f8e8m0fnu': 1, 'f4e2m1fn': 1}
COLLECTIVES = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all', 'collective-permute')
# Instructions that are not counted: most move nothing; for async-*, the computation that async-start calls is counted.
FREE = ('parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'after-all', 'partition-id', 'replica-id')
FREE += ('iota', 'async-update', 'async-done')
# Instructions that run other computations, whose instructions are counted in their place.
CONTROL = ('while', 'conditional', 'call', 'async-start')
SLICES = ('slice', 'dynamic-slice')  # read only a part of their operand
FREE_CALLS = ('"AllocateBuffer"', '"ConcatBitcast"')  # targets of custom calls of TPUs that move nothing

_HEADER = re.compile(r'^(ENTRY )?%?([\w.\-]+) .*\{$')
_INSTRUCTION = re.compile(r'^\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$')
_ARRAY = re.compile(r'\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r'(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)')
_BRANCHES = re.compile(r'branch_computations=\{([^}]*)\}')
_DEVICES = re.compile(r'(?:replica_count|num_partitions)=(\d+)')  # in the first line of a program, unless 1
_GROUPS = re.compile(r'replica_groups=\{\{([\d,]*)\}')
_IOTA_GROUPS = re.compile(r'replica_groups=\[(\d+),(\d+)\]')
_MESH_GROUPS = re.compile(r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\S*)? ?\{([^}]*)\}')
_REDUCE_SCATTER = 'calls=%all-reduce-scatter'  # a fusion of TPUs: an all-reduce, of which each device gets a slice


class Instruction(NamedTuple):
  """One instruction of a computation.

  Attributes:
    name: its name.
    opcode: what it computes.
    size: bytes of its result; not of the flags by which asynchronous instructions of TPUs synchronise, marked S(2).
    stored: bytes of its result in main memory; TPUs place some arrays in the memory of a core, marked S(1).
    operands: names of its operands.
    text: the rest of the line, with its attributes.
    is_root: whether it is the result of the computation.
  """

  name: str
  opcode: str
  size: int
  stored: int
  operands: tuple[str, ...]
  text: str
  is_root: bool


Block = Mapping[str, Instruction]  # the instructions of a computation by name


class Traffic(NamedTuple):
  """Traffic of one device in one run of a program.

  Attributes:
    memory: bytes that instructions read from device memory and write to it.
    collectives: bytes that the device sends over links, by kind, if groups are rings.
    payload: bytes of the results of collectives, by kind.
  """

  memory: float
  collectives: Mapping[str, float]
  payload: Mapping[str, float]


def count_traffic(text: str) -> Traffic:
  """Counts the traffic of a compiled program.

  Args:
    text: the optimised program, as `compiled.as_text()` returns it.
  """
  computations, entry = _parse(text)
  devices = math.prod(int(number) for number in _DEVICES.findall(text.partition('\n')[0]))
  memory = 0.0
  sent: dict[str, float] = {}
  payload: dict[str, float] = {}
  for instruction, repetitions, block in _executed(computations, entry):
    memory += repetitions * _moved(instruction, block, computations)
    for inner, inner_block in [(instruction, block), *_fused(instruction, computations)]:
      kind = inner.opcode.removesuffix('-start')
      if kind in COLLECTIVES:
        size = repetitions * _result_size(inner, inner_block)
        if _REDUCE_SCATTER in instruction.text:
          kind, size = 'reduce-scatter', repetitions * instruction.size
        payload[kind] = payload.get(kind, 0.0) + size
        sent[kind] = sent.get(kind, 0.0) + size * _ring_factor(kind, _group_size(inner.text, devices))
  return Traffic(memory, sent, payload)


def _parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
  """Returns the instructions of every computation by its name, and the name of the entry."""
  computations: dict[str, list[Instruction]] = {}
  entry = ''
  current: list[Instruction] = []
  for line in text.splitlines():
    if header := _HEADER.match(line):
      current = computations.setdefault(header[2], [])
      entry = header[2] if header[1] else entry
    elif instruction := _INSTRUCTION.match(line):
      root, name, shape, opcode, arguments = instruction.groups()
      current.append(
        Instruction(name, opcode, _size(shape, 'S(2)'), _size(shape, 'S('), _operands(arguments), arguments, bool(root))
      )
  return computations, entry


def _operands(arguments: str) -> tuple[str, ...]:
  """Returns the names before the parenthesis that closes the list of operands."""
  depths = itertools.accumulate((letter == '(') - (letter == ')') for letter in arguments)
  end = next((position for position, depth in enumerate(depths) if depth < 0), len(arguments))
  return tuple(re.findall(r'%([\w.\-]+)', arguments[:end]))


def _size(shape: str, excluded: str = 'none') -> int:
  """Returns the bytes of all arrays of a shape, except for those whose layout contains `excluded`.

  Types without a row in BYTES count as 0.
  """
  total = 0
  for dtype, sizes, layout in _ARRAY.findall(shape):
    if excluded not in layout:
      total += BYTES.get(dtype, 0) * math.prod(int(size) for size in sizes.split(',') if size)
  return total


def _executed(
  computations: Mapping[str, list[Instruction]], name: str, repetitions: float = 1.0
) -> Iterator[tuple[Instruction, float, Block]]:
  """Yields every instruction with the number of times that it runs, and its computation.

  Instructions of CONTROL are not yielded themselves, but those of the computations that they call.
  """
  block = {instruction.name: instruction for instruction in computations[name]}
  for instruction in computations[name]:
    if instruction.opcode not in CONTROL:
      yield instruction, repetitions, block
      continue
    called = _CALLED.findall(instruction.text)
    for branches in _BRANCHES.findall(instruction.text):
      called += re.findall(r'%?([\w.\-]+)', branches)
    steps = _TRIP_COUNT.search(instruction.text) if instruction.opcode == 'while' else None
    for inner in called:
      yield from _executed(computations, inner, repetitions * (int(steps[1]) if steps else 1))


def _fused(instruction: Instruction, computations: Mapping[str, list[Instruction]]) -> list[tuple[Instruction, Block]]:
  """Returns the instructions inside of a fusion, with their computation."""
  if instruction.opcode != 'fusion':
    return []
  body = computations[_CALLED.findall(instruction.text)[0]]
  block = {inner.name: inner for inner in body}
  return [(inner, block) for inner in body]


def _result_size(instruction: Instruction, block: Block) -> int:
  """Returns the bytes of the result, without the operands that the tuple of an asynchronous instruction contains."""
  if not _contains_operands(instruction):
    return instruction.size
  return instruction.size - sum(block[name].size for name in instruction.operands if name in block)


def _contains_operands(instruction: Instruction) -> bool:
  """Returns whether the result is a tuple that contains the operands, as that of most asynchronous instructions."""
  return instruction.opcode.endswith('-start') and not instruction.opcode.startswith('all-reduce')


def _group_size(text: str, devices: int) -> int:
  """Returns the number of devices in a group of a collective; a collective without groups has one of all `devices`."""
  if iota := _IOTA_GROUPS.search(text):
    return int(iota[2])
  if named := _MESH_GROUPS.search(text):
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    return math.prod(int(part or sizes[axis]) for axis, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2]))
  groups = _GROUPS.search(text)
  return len(groups[1].split(',')) if groups else devices


def _ring_factor(kind: str, group: int) -> float:
  """Returns the bytes that each device of a ring sends, per byte of the result."""
  share = (group - 1) / group
  return {'all-reduce': 2 * share, 'reduce-scatter': group - 1, 'collective-permute': 1.0}.get(kind, share)


def _moved(instruction: Instruction, block: Block, computations: Mapping[str, list[Instruction]]) -> float:
  """Returns the bytes that an instruction reads and writes."""
  opcode = instruction.opcode
  if opcode in FREE or opcode.endswith('-done'):
    return 0
  if opcode == 'custom-call' and any(target in instruction.text for target in FREE_CALLS):
    return 0
  operands = [block[name].stored if name in block else 0 for name in instruction.operands]
  if opcode == 'dynamic-update-slice':
    return operands[1] + min(block[instruction.operands[1]].size, instruction.stored)
  if opcode == 'fusion':
    body = computations[_CALLED.findall(instruction.text)[0]]
    return _moved_by_fusion(body, operands, instruction.stored)
  written = instruction.stored - (sum(operands) if _contains_operands(instruction) else 0)
  if opcode.removesuffix('-start') in SLICES:
    return min(operands[0], _result_size(instruction, block)) + written
  return sum(operands) + written


def _moved_by_fusion(body: list[Instruction], operands: list[int], result: int) -> float:
  """Returns the bytes that a fusion reads and writes; of arrays that it slices or updates in place, only the slices."""
  by_name = {instruction.name: instruction for instruction in body}
  read = 0
  for parameter in body:
    if parameter.opcode != 'parameter':
      continue
    size = operands[int(re.match(r'\d+', parameter.text)[0])]
    uses = [instruction for instruction in body if parameter.name in instruction.operands]
    if uses and all(_is_slice_of(use, parameter.name) for use in uses):
      size = min(size, sum(use.size for use in uses if use.opcode in SLICES))
    read += size
  root = next(instruction for instruction in body if instruction.is_root)
  outputs = [by_name[name] for name in root.operands] if root.opcode == 'tuple' else [root]
  written = 0
  for output in outputs:
    while output.opcode in ('bitcast', 'copy', 'convert') and output.operands[0] in by_name:
      output = by_name[output.operands[0]]
    is_update = output.opcode == 'dynamic-update-slice'
    written += by_name[output.operands[1]].size if is_update else output.size
  return read + min(written, result)


def _is_slice_of(use: Instruction, name: str) -> bool:
  """Returns whether an instruction reads a slice of an array, or replaces one in place."""
  return use.opcode in (*SLICES, 'dynamic-update-slice') and use.operands[0] == name
