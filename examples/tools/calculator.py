"""The simplest tool: a typed function. Its docstring is what the model is told."""

from __future__ import annotations

import ast
from typing import Annotated

from pydantic import Field

from stepwell.quickstart.agent import evaluate
from stepwell.trainer.tools import ToolError


def calculator(
    expression: Annotated[str, Field(description="e.g. (12 + 34) * 5 / 2", max_length=1000)],
) -> str:
    """Evaluate an arithmetic expression: numbers, + - * / // % and brackets."""
    try:
        return str(evaluate(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (SyntaxError, ValueError, TypeError, ArithmeticError):
        raise ToolError("not an arithmetic expression") from None
    except (RecursionError, MemoryError):
        raise ToolError("expression too long") from None
