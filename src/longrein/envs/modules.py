"""Small pure-Python modules to put bugs into, and streams of calls that show what they do.

Always true: each module is right by its docstrings, every call in its cases ends, and gives or raises something that JSON holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

Case = list[list[Any]]
"""Calls in a row, each a name and its arguments; where the first is a class, the others are methods of what it made."""


class Module(NamedTuple):
    source: str
    case: Callable[[random.Random], Case]
    """One use of it."""


INTERVALS = '''
"""Half-open intervals [start, end), as pairs of whole numbers."""


def merge(intervals):
    """The same points in as few intervals as can be, in order; intervals that touch become one."""
    merged = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def covered(intervals):
    """How many whole numbers lie in at least one of the intervals."""
    return sum(end - start for start, end in merge(intervals))


def contains(intervals, point):
    """Whether a point lies in one of the intervals."""
    return any(start <= point < end for start, end in intervals)


def gaps(intervals, start, end):
    """The parts of [start, end) that no interval covers, in order."""
    found = []
    at = start
    for low, high in merge(intervals):
        if low > at and at < end:
            found.append([at, min(low, end)])
        at = max(at, high)
    if at < end:
        found.append([at, end])
    return found
'''


def _intervals(rng: random.Random) -> Case:
    pairs = [[low, low + rng.randint(-1, 6)] for low in (rng.randint(0, 20) for _ in range(rng.randint(0, 5)))]
    return [
        rng.choice(
            [
                ["merge", [pairs]],
                ["covered", [pairs]],
                ["contains", [pairs, rng.randint(-1, 26)]],
                ["gaps", [pairs, rng.randint(0, 8), rng.randint(9, 28)]],
            ]
        )
    ]


ACCOUNT = '''
"""An account that may be overdrawn a little, at a price."""

OVERDRAFT = 50
FEE = 2


class Account:
    """Whole amounts go in and out; every change is in `history`."""

    def __init__(self, balance=0):
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        """Put an amount in; gives the new balance. An amount that is not above 0 is refused with ValueError."""
        if amount <= 0:
            raise ValueError("amount")
        self.balance += amount
        self.history.append(amount)
        return self.balance

    def withdraw(self, amount):
        """Take an amount out; gives the new balance. Below 0 costs FEE more; below -OVERDRAFT is refused with ValueError."""
        if amount <= 0:
            raise ValueError("amount")
        left = self.balance - amount
        if left < 0:
            left -= FEE
        if left < -OVERDRAFT:
            raise ValueError("overdraft")
        self.history.append(left - self.balance)
        self.balance = left
        return self.balance

    def largest(self):
        """The largest withdrawal so far, as a number above 0; 0 when there was none."""
        return -min([change for change in self.history if change < 0], default=0)

    def total_in(self):
        """All that was put in."""
        return sum(change for change in self.history if change > 0)
'''


def _account(rng: random.Random) -> Case:
    steps: Case = [["Account", [rng.randint(0, 40)]]]
    for _ in range(rng.randint(2, 6)):
        steps.append([rng.choice(["deposit", "withdraw", "withdraw"]), [rng.choice([0, 1, 5, 12, 20, 33, 50, 51, 60])]])
    return [*steps, ["largest", []], ["total_in", []]]


CACHE = '''
"""A cache that forgets what was not used for longest."""


class Cache:
    """Holds at most `size` values."""

    def __init__(self, size):
        self.size = size
        self.values = {}
        self.misses = 0

    def get(self, key):
        """The value of a key, which counts as used now; None for a miss, which is counted."""
        if key not in self.values:
            self.misses += 1
            return None
        value = self.values.pop(key)
        self.values[key] = value
        return value

    def put(self, key, value):
        """Keep a value, which counts as used now; gives the key that was forgotten for it, or None."""
        forgotten = None
        if key in self.values:
            del self.values[key]
        elif len(self.values) >= self.size:
            forgotten = next(iter(self.values))
            del self.values[forgotten]
        self.values[key] = value
        return forgotten

    def keys(self):
        """From the one not used for longest to the one used last."""
        return list(self.values)

    def missed(self):
        """How often `get` found nothing."""
        return self.misses
'''


def _cache(rng: random.Random) -> Case:
    steps: Case = [["Cache", [rng.randint(1, 3)]]]
    for number in range(rng.randint(3, 9)):
        key = rng.choice("abcd")
        steps.append(["put", [key, number]] if rng.random() < 0.6 else ["get", [key]])
    return [*steps, ["keys", []], ["missed", []]]


TEXT = '''
"""Plain text in lines and columns."""


def wrap(text, width):
    """Lines of at most `width` characters, broken between words; a word that is longer stands alone on its line."""
    lines = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = line + " " + word if line else word
    if line:
        lines.append(line)
    return lines


def columns(rows, gap=2):
    """Rows of words as lines, each column as wide as its longest word and `gap` spaces; no spaces at the end of a line."""
    widths = []
    for row in rows:
        for index, word in enumerate(row):
            if index == len(widths):
                widths.append(0)
            widths[index] = max(widths[index], len(word))
    return ["".join(word.ljust(widths[index] + gap) for index, word in enumerate(row)).rstrip() for row in rows]


def shorten(text, width):
    """The text where it fits, else its start and three dots, `width` characters in all (at least 3)."""
    if len(text) <= width:
        return text
    return text[: width - 3] + "..."
'''

_WORDS = ("a", "to", "oak", "reed", "stone", "meadow", "lantern", "windmill")


def _text(rng: random.Random) -> Case:
    words = [rng.choice(_WORDS) for _ in range(rng.randint(0, 9))]
    rows = [[rng.choice(_WORDS) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 3))]
    return [
        rng.choice(
            [
                ["wrap", [" ".join(words), rng.randint(3, 16)]],
                ["columns", [rows, rng.randint(1, 3)]],
                ["shorten", [" ".join(words), rng.randint(4, 20)]],
            ]
        )
    ]


RUNS = '''
"""Runs of equal things."""


def encode(items):
    """Pairs of an item and how often it stands in a row."""
    pairs = []
    for item in items:
        if pairs and pairs[-1][0] == item:
            pairs[-1][1] += 1
        else:
            pairs.append([item, 1])
    return pairs


def decode(pairs):
    """What `encode` was given; a count below 0 is refused with ValueError."""
    items = []
    for item, count in pairs:
        if count < 0:
            raise ValueError("count")
        items.extend([item] * count)
    return items


def longest(items):
    """The length of the longest run; 0 of nothing."""
    return max((count for _, count in encode(items)), default=0)


def streaks(items, least):
    """Where runs of at least `least` items start."""
    starts = []
    at = 0
    for _, count in encode(items):
        if count >= least:
            starts.append(at)
        at += count
    return starts
'''


def _runs(rng: random.Random) -> Case:
    items = [rng.choice("xyz") for _ in range(rng.randint(0, 4)) for _ in range(rng.randint(1, 3))]
    pairs = [[rng.choice("pq"), rng.randint(-1, 4) if rng.random() < 0.2 else rng.randint(0, 4)] for _ in range(3)]
    return [
        rng.choice([["encode", [items]], ["decode", [pairs]], ["longest", [items]], ["streaks", [items, rng.randint(1, 3)]]])
    ]


GRID = '''
"""Maps of equal rows: '#' is a wall, '.' is free."""


def neighbours(grid, row, column):
    """The free places beside a place (up, down, left, right), in that order."""
    found = []
    for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        y = row + down
        x = column + right
        if 0 <= y < len(grid) and 0 <= x < len(grid[0]) and grid[y][x] == ".":
            found.append([y, x])
    return found


def distance(grid, start, goal):
    """The fewest steps from one free place to another; -1 where there is no way."""
    seen = {tuple(start): 0}
    waiting = [tuple(start)]
    while waiting:
        place = waiting.pop(0)
        if place == tuple(goal):
            return seen[place]
        for beside in neighbours(grid, place[0], place[1]):
            if tuple(beside) not in seen:
                seen[tuple(beside)] = seen[place] + 1
                waiting.append(tuple(beside))
    return -1


def rooms(grid):
    """How many separate free areas there are."""
    count = 0
    seen = set()
    for row in range(len(grid)):
        for column in range(len(grid[0])):
            if grid[row][column] != "." or (row, column) in seen:
                continue
            count += 1
            waiting = [(row, column)]
            while waiting:
                place = waiting.pop()
                if place in seen:
                    continue
                seen.add(place)
                waiting.extend(tuple(beside) for beside in neighbours(grid, place[0], place[1]))
    return count
'''


def _grid(rng: random.Random) -> Case:
    width = rng.randint(2, 5)
    grid = ["".join(rng.choice("...#") for _ in range(width)) for _ in range(rng.randint(2, 4))]
    grid[0], grid[-1] = "." + grid[0][1:], grid[-1][:-1] + "."
    place = [rng.randrange(len(grid)), rng.randrange(width)]
    goal = [len(grid) - 1, width - 1]
    return [rng.choice([["neighbours", [grid, *place]], ["distance", [grid, [0, 0], goal]], ["rooms", [grid]]])]


ORDER = '''
"""What must be done before what."""


def order(needs):
    """All tasks, each after those it needs; of several that could be next, the first by name. A circle raises ValueError."""
    left = {task: set(before) for task, before in needs.items()}
    for before in needs.values():
        for task in before:
            left.setdefault(task, set())
    done = []
    while left:
        free = sorted(task for task, before in left.items() if not before)
        if not free:
            raise ValueError("circle")
        first = free[0]
        done.append(first)
        del left[first]
        for before in left.values():
            before.discard(first)
    return done


def depth(needs, task):
    """How many tasks, in the longest chain, come before a task."""
    return max((depth(needs, before) + 1 for before in needs.get(task, [])), default=0)


def needed(needs, task):
    """Everything that must be done before a task, by name."""
    found = set()
    waiting = list(needs.get(task, []))
    while waiting:
        before = waiting.pop()
        if before not in found:
            found.add(before)
            waiting.extend(needs.get(before, []))
    return sorted(found)
'''


def _order(rng: random.Random) -> Case:
    names = list("abcdef")[: rng.randint(2, 6)]
    rng.shuffle(names)
    needs = {name: sorted(rng.sample(names[:place], rng.randint(0, min(2, place)))) for place, name in enumerate(names)}
    circle = {**needs, names[0]: [names[-1]], names[-1]: [names[0]]}
    task = rng.choice(names)
    return [rng.choice([["order", [needs]], ["order", [circle]], ["depth", [needs, task]], ["needed", [needs, task]]])]


NUMERALS = '''
"""Numbers in other clothes."""

DIGITS = "0123456789abcdef"


def to_base(number, base):
    """A whole number in a base from 2 to 16, with a minus sign below 0; other bases raise ValueError."""
    if not 2 <= base <= 16:
        raise ValueError("base")
    if number == 0:
        return "0"
    text = ""
    left = abs(number)
    while left > 0:
        text = DIGITS[left % base] + text
        left = left // base
    return "-" + text if number < 0 else text


def roman(number):
    """A number from 1 to 3999 in Roman numerals."""
    if not 1 <= number <= 3999:
        raise ValueError("number")
    text = ""
    for value, sign in ((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"),
                        (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")):
        while number >= value:
            text += sign
            number -= value
    return text


def clock(seconds):
    """Seconds as h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours > 0:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
'''


def _numerals(rng: random.Random) -> Case:
    return [
        rng.choice(
            [
                ["to_base", [rng.randint(-40, 300), rng.choice([1, 2, 3, 8, 10, 16, 16, 17])]],
                ["roman", [rng.choice([0, 1, rng.randint(1, 60), rng.randint(1, 3999), 3999, 4000])]],
                ["clock", [rng.choice([0, 59, 60, 3599, 3600, 3661, rng.randint(0, 90000)])]],
            ]
        )
    ]


MODULES = {
    "intervals": Module(INTERVALS, _intervals),
    "account": Module(ACCOUNT, _account),
    "cache": Module(CACHE, _cache),
    "text": Module(TEXT, _text),
    "runs": Module(RUNS, _runs),
    "grid": Module(GRID, _grid),
    "order": Module(ORDER, _order),
    "numerals": Module(NUMERALS, _numerals),
}
