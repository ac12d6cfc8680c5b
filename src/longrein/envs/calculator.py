"""Shopping sums that are too large for the head: look prices up with one tool, compute with another, answer with a number.

Always true of a task: its answer is exact in hundredths, and depends on prices that only the `price` tool tells. Expressions
are read through `ast` and computed in exact fractions of bounded size; nothing is ever passed to `eval`.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from longrein.contract import LongreinError, Message
from longrein.envs.environment import EnvConfig, EnvConfigError, Environment
from longrein.envs.tools import ToolEpisode, tool

GOODS = ("bench", "carpet", "clock", "desk", "fridge", "guitar", "kettle", "lamp", "mirror", "piano", "sofa", "tent")

OPERATORS: dict[type[ast.AST], Callable[..., Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


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
    def __init__(self, task_data: dict[str, Any], config: CalculatorConfig) -> None:
        super().__init__(task_data, config)
        for name in ("order", "prices", "discount", "delivery"):
            if name not in task_data:
                raise LongreinError(f"task_data has no {name!r}: it has {', '.join(task_data) or 'nothing'}")

    def start(self) -> list[Message]:
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
        return str(prices.get(item, f"error: there is no {item!r}; there is {', '.join(prices)}"))

    @tool
    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers, + - * / and parentheses, like (2 + 3) * 4.5
        """
        try:
            return written(value(str(expression)))
        except (ValueError, ZeroDivisionError) as error:
            return f"error: {error}"

    def score(self, answer: str) -> float:
        numbers = re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", ""))
        return float(bool(numbers) and Fraction(numbers[-1]) == total(self.task))


class Calculator(Environment):
    """Word problems that need a calculator.

    >>> task = Calculator.tasks(1, env_config={"items": 2})[0]
    >>> len(task["order"])
    2
    """

    Config = CalculatorConfig
    episode_class = OrderEpisode

    @classmethod
    def tasks(cls, count: int, *, seed: int = 0, env_config: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        config = cls.check_config(env_config or {})
        assert isinstance(config, CalculatorConfig)
        rng = random.Random(f"calculator-{seed}")
        return [_task(rng, config.items) for _ in range(count)]


def _task(rng: random.Random, items: int) -> dict[str, Any]:
    return {
        "order": {item: rng.randint(12, 98) for item in rng.sample(GOODS, items)},
        "prices": {item: rng.randint(101, 997) for item in GOODS},
        "discount": rng.randint(3, 29),
        "delivery": rng.randint(101, 997),
    }


def total(task: dict[str, Any]) -> Fraction:
    """What an order costs."""
    goods = sum(count * task["prices"][item] for item, count in task["order"].items())
    return Fraction(goods * (100 - task["discount"]), 100) + task["delivery"]


def value(expression: str) -> Fraction:
    """An arithmetic expression's value; ValueError when it is anything else."""
    if len(expression) > 500:
        raise ValueError(f"the expression has {len(expression)} characters; 500 is the most")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"cannot read {expression!r}: {error}") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            result = Fraction(str(number))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_value(operand))
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not a number or + - * /")
    return result


def written(number: Fraction) -> str:
    """A number as people write it: whole, or with up to six decimals."""
    return f"{float(number):.6f}".rstrip("0").rstrip(".") if number.denominator > 1 else str(number.numerator)
