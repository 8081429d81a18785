"""The loops of machine code.

Code that is seldom run, such as a second look at a barrier, stands behind the rest and jumps back
into it. So a loop is not what lies between a label and a branch to it, but what can be reached from
the label and leads back to it.
"""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

_BRANCH_TARGET = re.compile(r"`\((\.L_x_\w+)\)")
_BRANCHES = ("BRA", "UBRA", "JMP")
_ENDS = ("EXIT", "RET")


class Instruction(NamedTuple):
    name: str
    modifiers: str
    operands: str
    predicate: str = ""  # that it depends on

    @property
    def may_go_on(self) -> bool:
        """Whether the next instruction may follow it. A branch has its predicate before its name,
        or as its first operand."""
        if self.name not in (*_BRANCHES, *_ENDS):
            return True
        return bool(self.predicate) or not self.operands.strip().startswith(("`", ";", "R"))

    @property
    def target(self) -> str | None:
        found = _BRANCH_TARGET.search(self.operands) if self.name in _BRANCHES else None
        return found[1] if found else None


Code = Sequence[Instruction | str]  # labels are strings


class _Block(NamedTuple):
    instructions: list[Instruction]
    labels: list[str]


def innermost(code: Code, wanted: Collection[str]) -> list[list[Instruction]]:
    """The loops with instructions of these names that hold no smaller such loop. Those that begin
    at the same instruction are one."""
    blocks = _blocks(code)
    followers = _followers(blocks)
    bodies: dict[int, set[int]] = {}
    for last, first in _back_edges(followers):
        bodies.setdefault(first, {first}).update(_between(first, last, followers))
    found = [
        body
        for body in bodies.values()
        if any(each.name in wanted for i in body for each in blocks[i].instructions)
    ]
    return [
        [each for i in sorted(body) for each in blocks[i].instructions]
        for body in found
        if not any(other < body for other in found)
    ]


def _blocks(code: Code) -> list[_Block]:
    """Runs of instructions without a label or a branch in between."""
    blocks = [_Block([], [])]
    for item in code:
        if isinstance(item, str):
            if blocks[-1].instructions:
                blocks.append(_Block([], []))
            blocks[-1].labels.append(item)
            continue
        blocks[-1].instructions.append(item)
        if item.name in (*_BRANCHES, *_ENDS):
            blocks.append(_Block([], []))
    return blocks


def _followers(blocks: Sequence[_Block]) -> list[list[int]]:
    """Of each block, those that may come next."""
    places = {label: i for i, block in enumerate(blocks) for label in block.labels}
    followers = []
    for i, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        found = [i + 1] if last is None or last.may_go_on else []
        if last is not None and last.target in places:
            found.append(places[last.target])
        followers.append([each for each in found if each < len(blocks)])
    return followers


def _back_edges(followers: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """From a block to one on the way to it from the code's start."""
    edges, on_the_way, seen = [], [0], {0}
    rest = [iter(followers[0])]
    while rest:
        following = next(rest[-1], None)
        if following is None:
            rest.pop()
            on_the_way.pop()
        elif following in on_the_way:
            edges.append((on_the_way[-1], following))
        elif following not in seen:
            seen.add(following)
            on_the_way.append(following)
            rest.append(iter(followers[following]))
    return edges


def _between(first: int, last: int, followers: Sequence[Sequence[int]]) -> set[int]:
    """The blocks that lead to `last` without passing `first`."""
    before: dict[int, list[int]] = {}
    for i, found in enumerate(followers):
        for following in found:
            before.setdefault(following, []).append(i)
    body, rest = {first}, [last]
    while rest:
        block = rest.pop()
        if block not in body:
            body.add(block)
            rest += before.get(block, [])
    return body
