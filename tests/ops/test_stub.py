"""The stub of the native extension names exactly what the extension offers, with the same arguments."""

import ast
import re
from pathlib import Path

import hydra_engine
from hydra_engine import _C

STUB = Path(hydra_engine.__file__).parent / "_C.pyi"


def stub_arguments(nodes: list[ast.stmt], prefix: str = "") -> dict[str, list[str]]:
    """Function and method names -> argument names, `self` left out."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
            arguments = [argument.arg for argument in node.args.args if argument.arg != "self"]
            found[prefix + node.name] = ["(property)"] if is_property else arguments
        elif isinstance(node, ast.ClassDef):
            found |= stub_arguments(node.body, f"{node.name}.")
    return found


def module_arguments(owner: object, prefix: str = "") -> dict[str, list[str]]:
    """The same from pybind11's docstrings, whose first line is the signature."""
    found: dict[str, list[str]] = {}
    for name, member in vars(owner).items():
        if isinstance(member, type):
            found |= module_arguments(member, f"{name}.")
        elif isinstance(member, property):
            found[prefix + name] = ["(property)"]
        elif callable(member) and (name == "__init__" or not name.startswith("_")):
            signature = (member.__doc__ or "").splitlines()[0]
            inside = signature[signature.index("(") + 1 : signature.rindex(")")]
            names = re.findall(r"(?:^|, )(\w+):", inside)
            found[prefix + name] = [argument for argument in names if argument != "self"]
    return found


def test_stub_and_module_agree() -> None:
    assert stub_arguments(ast.parse(STUB.read_text()).body) == module_arguments(_C)
