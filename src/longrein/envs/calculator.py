"""Orders to add up: look prices up with one tool, compute with another, answer with a number.

Always true of a task: its answer is exact in hundredths and hangs on prices that only the `price` tool tells. Expressions
are read through `ast` and computed in exact fractions; nothing is ever passed to `eval`.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from longrein.contract import LongreinError, Message
from longrein.envs.environment import EnvConfig, EnvConfigError, Environment
from longrein.envs.tools import ToolEpisode, tool

GOODS = ("bench", "carpet", "clock", "desk", "fridge", "guitar", "kettle", "lamp", "mirror", "piano", "sofa", "tent")
BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass(frozen=True, kw_only=True)
class CalculatorConfig(EnvConfig):
    max_turns: int = 12
    max_tokens: int = 2048
    max_reply_tokens: int = 256
    items: int = 3
    """Different goods in an order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items not in range(1, len(GOODS) + 1):
            raise EnvConfigError(f"items is {self.items!r}; it must be a whole number from 1 to {len(GOODS)}")


class OrderEpisode(ToolEpisode):
    def start(self) -> list[Message]:
        if missing := {"order", "prices", "discount", "delivery"} - self.task.keys():
            raise LongreinError(f"task_data has no {min(missing)!r}; take tasks from `Calculator.tasks`, or write all four")
        order = ", ".join(f"{count} x {item}" for item, count in self.task["order"].items())
        text = (
            f"A hotel orders {order}. It gets {self.task['discount']} % off the price of the goods and then pays "
            f"{self.task['delivery']} for delivery. What does it pay in all? Look up the price of each item, calculate, and "
            "answer with the number alone."
        )
        return [{"role": "user", "content": text}]

    @tool
    def price(self, item: str) -> str:
        """The price of one piece of an item.

        Args:
            item: The item, as in the order.
        """
        prices = self.task["prices"]
        return str(prices.get(str(item), f"error: there is no {item!r}; there is {', '.join(prices)}"))

    @tool
    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses, like (2 + 3) * 4.5
        """
        try:
            number = value(str(expression))
            return str(number) if number.denominator == 1 else f"{float(number):.6f}".rstrip("0")
        except (ValueError, ArithmeticError) as error:
            return f"error: {error}"

    def score(self, answer: str) -> float:
        numbers = re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", ""))
        return float(bool(numbers) and abs(float(numbers[-1]) - total(self.task)) < 0.005)


class Calculator(Environment):
    """Word problems that need a calculator.

    >>> len(Calculator.tasks(1, env_config={"items": 2})[0]["order"])
    2
    """

    Config = CalculatorConfig
    episode_class = OrderEpisode

    @classmethod
    def tasks(cls, count: int, *, seed: int = 0, env_config: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        config = cls.check_config(env_config or {})
        assert isinstance(config, CalculatorConfig)
        rng = random.Random(f"calculator-{seed}")
        return [
            {
                "order": {item: rng.randint(12, 98) for item in rng.sample(GOODS, config.items)},
                "prices": {item: rng.randint(101, 997) for item in GOODS},
                "discount": rng.randint(3, 29),
                "delivery": rng.randint(101, 997),
            }
            for _ in range(count)
        ]


def total(task: dict[str, Any]) -> float:
    """What an order costs."""
    goods = sum(count * task["prices"][item] for item, count in task["order"].items())
    return goods * (100 - task["discount"]) / 100 + task["delivery"]


def value(expression: str) -> Fraction:
    """The value of an arithmetic expression; ValueError for anything else."""
    if len(expression) > 500:
        raise ValueError(f"the expression has {len(expression)} characters; it may have 500")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot read {expression!r}: {error}") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
            return BINARY[type(op)](_value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)!r} is no number and none of + - * /")
