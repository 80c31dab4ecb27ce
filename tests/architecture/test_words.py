"""The rules for words (docs/glossary.md) that a machine can hold: names and first words of docstrings.

Where a rule names a number, that many are still there: it may fall and not rise.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.sources import ROOT, SHIPPED, docstrings_of, files_in, nodes_of, text_of

# Whole names; prose may use them.
RETIRED = (
    *("Flight", "flights", "Holders", "Suspects", "suspects", "Lending", "lending", "StatusBook", "Place"),
    *("_bury", "_mourn", "corpse", "Dying", "dying", "hear", "excuse", "doomed", "gave_way"),
    *("seat", "seats", "Seats", "DeviceSeats", "SeatPool", "Tenancy", "Recipe", "recipe", "plain_from", "drawn_from"),
    *("Draws", "Commons", "OwnCommons", "Forwarding", "plain_messages", "TokensEvent", "FinishEvent"),
    *("SchedulerStats", "StepLog", "Outside", "Modes", "attainable", "put_back", "Draft", "lend", "Intake"),
    *("RequestBook", "ImageBook", "check_book", "Demand", "demand_of", "PrefixReuse", "TakenBack", "is_job"),
    *("num_named", "Front", "gives_way", "owe", "owe_all", "Arrival", "hands_over", "images_asked", "HandoverEnd"),
    *("DecodeBlocks", "wing", "wings", "WINGS"),
)
# Prepositions and participles do not say what a function does or what an attribute is: `slot_of`, `with_devices`.
NO_NAMES = (
    *("of", "at", "on", "under", "behind", "between", "within", "beside", "after", "to", "about", "beyond", "without"),
    *("told", "lacking", "settled", "barred", "overtaken", "placed", "made", "asked", "kept"),
)
# These may be fields and properties, which describe; a function asks, records or returns, and says which.
NO_FUNCTIONS = (
    *("failed", "written", "finished", "recorded", "given", "captured", "wanted", "sampled", "parsed", "ended"),
    *(
        "closed",
        "lost",
        "sent",
        "drawn",
        "taken",
        "found",
        "opened",
        "started",
        "stopped",
        "removed",
        "added",
        "stored",
    ),
)
# Of `NO_NAMES`, how many definitions are still there.
PRESENT = {"of": 2, "to": 1}
# A docstring begins with a verb or with the noun of what comes back.
NO_FIRST_WORDS = {
    *("Of", "As", "By", "For", "In", "With", "From", "At", "On", "Under", "Behind", "To", "Without"),
    *("Those", "Others", "Where", "What", "Whose", "Whether", "Which", "How", "When", "Once", "It", "That"),
    *("One", "Each", "Every", "All", "Nothing"),
    *("And", "But", "So", "Not", "If", "Unless", "Else", "Until", "Since"),
    *("Whatever", "Wherever", "Who", "Whoever", "Whichever", "Whenever", "However", "Why", "While", "Within", "Over"),
    *("Its", "Their", "Our", "Ours", "This", "These", "Here", "There", "Elsewhere", "Both", "Either", "Neither", "Nor"),
    *("Or", "Otherwise", "Any", "Some", "Somebody", "Nobody", "No", "More", "Most", "Mostly", "Less", "Such", "Like"),
    *("Up", "Between", "Around", "Below", "Inside", "Also", "Alone", "Just", "Too", "Twice", "Per", "Further"),
}
_MAY_BEGIN_SO = re.compile(rf"[\"'][\W_]*({'|'.join(sorted(NO_FIRST_WORDS))})\b")  # parsing all tests takes seconds
# In prose, code and comments.
WORKSHOP = re.compile(
    r"\b(wings?|lodgers?|h(ang|angs|ung|anging) on|put(s|ting)? in|lets? go of|(is|are|was|were) told(?! apart))\b",
    re.IGNORECASE,
)
SELF = Path(__file__)


def names_in(nodes: tuple[ast.AST, ...]) -> Iterator[tuple[str, int]]:
    """Names of variables, attributes, parameters, definitions and imports, with their lines."""
    for node in nodes:
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                for word in value.split("."):
                    yield word, getattr(node, "lineno", 0)


def definitions_in(nodes: tuple[ast.AST, ...]) -> Iterator[tuple[str, int]]:
    """Names of functions, and of attributes that a class declares or sets on `self`, with their lines."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield item.target.id, item.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr, node.lineno


def parsed(source: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(source)))


def place(path: Path, line: int, said: str) -> str:
    return f"{path.relative_to(ROOT)}:{line}: {said}"


def test_retired_names_are_found_wherever_a_name_can_stand() -> None:
    lines = ("import a.seat as b", "from Place import hear", "def corpse(doomed): ...", "seats = x.recipe(Seats=1)")
    words = [word for word, _ in names_in(parsed("\n".join(lines)))]
    found = {word for word in words if word in RETIRED}
    assert found == {"seat", "Place", "hear", "corpse", "doomed", "seats", "recipe", "Seats"}


def test_retired_names_are_gone() -> None:
    found = [
        place(path, line, word)
        for path in files_in(*SHIPPED)
        for word, line in names_in(nodes_of(path))
        if word in RETIRED
    ]
    assert not found, "retired words, see docs/glossary.md: " + ", ".join(found)


def test_limits_are_called_max_and_min() -> None:
    found = [
        place(path, line, word)
        for path in files_in(*SHIPPED, "bench", "tests")
        for word, line in (names_in(nodes_of(path)) if re.search(r"\b_*(most|least)_", text_of(path)) else ())
        if re.match(r"_*(most|least)_", word) and word != "least_loaded"
    ]
    assert not found, "max_ and min_: " + ", ".join(found)


def test_no_new_name_is_only_a_preposition_or_a_participle() -> None:
    found = [
        (word, place(path, line, word))
        for path in files_in(*SHIPPED)
        for word, line in definitions_in(nodes_of(path))
        if word in NO_NAMES
    ]
    number = Counter(word for word, _ in found)
    for word, count in number.items():
        places = [where for name, where in found if name == word]
        assert count <= PRESENT.get(word, 0), f"more than there were: {places}"


def functions_in(nodes: tuple[ast.AST, ...]) -> Iterator[tuple[str, int]]:
    """Names of functions that are no properties, with their lines."""
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for node in functions:
        if not any(ast.unparse(item).endswith("property") for item in node.decorator_list):
            yield node.name, node.lineno


def test_functions_are_not_named_by_a_participle() -> None:
    found = [
        place(path, line, word)
        for path in files_in(*SHIPPED)
        for word, line in functions_in(nodes_of(path))
        if word in NO_FUNCTIONS
    ]
    assert not found, "a participle does not say what the function does: " + ", ".join(found)
    source = "class A:\n    @property\n    def ended(self): ...\n    def failed(self): ..."
    assert [name for name, _ in functions_in(parsed(source))] == ["failed"]


def test_definitions_are_found_as_functions_fields_and_attributes() -> None:
    source = "class A:\n    of: int\n    def at(self):\n        self.told = on = 1\n        self.x[0] = self.under"
    assert {name for name, _ in definitions_in(parsed(source))} == {"of", "at", "told"}


def fragments_in(path: Path) -> Iterator[tuple[int, str]]:
    for line, text in docstrings_of(path) if _MAY_BEGIN_SO.search(text_of(path)) else ():
        first = re.match(r"[\W_]*(\w+)", text)
        if first and first[1] in NO_FIRST_WORDS and not text.startswith(first[1] + "_"):
            yield line, text.partition("\n")[0]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    files = files_in(*SHIPPED, "bench", "tests", "examples")
    found = [place(path, line, text) for path in files for line, text in fragments_in(path)]
    assert not found, "docstrings begin with a verb or the noun of what comes back:\n" + "\n".join(found)


def test_workshop_words_stay_out() -> None:
    folders = (*SHIPPED, "bench", "tests", "docs", "csrc", "examples")
    files = [*files_in(*folders, suffixes=(".py", ".pyi", ".md", ".cpp", ".h", ".cu", ".sh")), *ROOT.glob("*.md")]
    found = [
        place(path, text_of(path)[: word.start()].count("\n") + 1, word[0])
        for path in files
        if path != SELF
        for word in WORKSHOP.finditer(text_of(path))
    ]
    assert not found, "words of the workshop, see docs/glossary.md:\n" + "\n".join(found)
