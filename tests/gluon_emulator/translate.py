"""A kernel's source as plain Python: functions without what only a compiler understands, classes in the place of
aggregates, and the few functions of the language that a scalar needs."""

import ast
import inspect
import textwrap
from functools import cache

import numpy as np


class _ToFunction(ast.NodeTransformer):
    """x.to(type) -> _to(x, type), for a scalar is a plain number; values.type.layout -> None."""

    def visit_Call(self, node):
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return ast.copy_location(ast.Call(ast.Name("_to", ast.Load()), [node.func.value, *node.args], []), node)
        return node

    def visit_Attribute(self, node):
        self.generic_visit(node)
        if node.attr == "layout" and isinstance(node.value, ast.Attribute) and node.value.attr == "type":
            return ast.copy_location(ast.Constant(None), node)
        return node


def to(value, dtype):
    return value.astype(dtype) if isinstance(value, np.ndarray) and value.ndim else dtype(value)


def plain_class(aggregate):
    """A class with the fields of an aggregate, without its methods."""

    def set_fields(self, *values, **named):
        fields = aggregate.aggregate_fields
        given = dict(zip(fields, values)) | named
        assert len(values) + len(named) == len(fields) and set(given) == set(fields), (aggregate, values, named)
        vars(self).update(given)

    return type(aggregate.__name__, (), {"__init__": set_fields})


def where(condition, yes, no):
    if any(isinstance(value, np.ndarray) for value in (condition, yes, no)):
        found = np.where(condition, yes, no)
        kept = [value.dtype for value in (yes, no) if isinstance(value, np.ndarray)]
        return found.astype(kept[0]) if kept else found
    return yes if condition else no


@cache
def compiled(function):
    tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)))
    tree.body[0].decorator_list = []
    for argument in ast.walk(tree):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return compile(ast.fix_missing_locations(_ToFunction().visit(tree)), inspect.getfile(function.fn), "exec")
