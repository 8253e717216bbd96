"""What the code must not contain anywhere, or anywhere but in the places named here."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.structure.source import ENTRY_POINTS, ROOT, Module, dotted, files_of_tests, modules

LONGEST_FILE = 500
LONGEST_FUNCTION = 60
# Longer for a reason.
LONG_FILES = {
    "caldrix_protocol.messages": "the whole contract, read beside SPEC.md",
    "caldrix_protocol.refusals": "one table, read by code",
}
LONG_FUNCTIONS: dict[str, str] = {}

# What reads the environment of its process. Everything else is told.
ENVIRONMENT_READERS = ENTRY_POINTS

# A thread that ends the process whatever the other threads do: the daemon of this worker is gone.
HARD_EXITS = {"caldrixd.worker.main", "caldrixd.worker.pipe"}

MUTATORS = {"append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove"}


def called(names: set[str], allowed: set[str]) -> list[str]:
    """Calls of any of `names` outside the modules `allowed`."""
    return [
        f"{module.name}:{node.lineno} {name}"
        for module in modules()
        if module.name not in allowed
        for name, node in module.calls()
        if name in names
    ]


def mentioned(names: set[str], allowed: set[str]) -> list[str]:
    """Mentions of dotted names outside the modules `allowed`."""
    return [
        f"{module.name}:{node.lineno} {dotted(node)}"
        for module in modules()
        if module.name not in allowed
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute | ast.Name) and dotted(node) in names
    ]


def test_only_the_terminal_prints() -> None:
    assert called({"print"}, {"caldrix_client.terminal"}) == []
    assert called({"sys.stdout.write", "sys.stderr.write"}, {"caldrix_client.terminal", *ENTRY_POINTS}) == []


def test_only_programs_exit() -> None:
    assert called({"sys.exit", "exit", "quit"}, ENTRY_POINTS) == []
    assert called({"os._exit"}, {*ENTRY_POINTS, *HARD_EXITS}) == []
    raised = [
        f"{module.name}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Raise) and "SystemExit" in ast.unparse(node)
    ]
    assert raised == []


def test_only_programs_read_the_environment() -> None:
    assert mentioned({"os.environ", "os.environb", "os.getenv"}, ENVIRONMENT_READERS) == []


def test_no_code_is_found_by_a_name_or_a_pickle() -> None:
    names = {"eval", "exec", "compile", "__import__", "importlib.import_module", "globals", "pickle.loads"}
    assert called(names, set()) == []
    users = [module.name for module in modules() if {"pickle", "marshal", "shelve"} & set(module.imports())]
    assert users == []


def test_the_protocol_does_no_io_and_reads_no_clock() -> None:
    faults = [
        f"{module.name} {name}"
        for module in modules()
        if module.name.startswith("caldrix_protocol")
        for name in {*module.imports(), *(name for name, _ in module.calls())}
        if name.split(".")[0]
        in {"socket", "time", "select", "asyncio", "anyio", "subprocess", "threading", "open"}
    ]
    assert faults == []


def test_only_two_modules_of_the_protocol_look_at_the_file_system() -> None:
    users = [
        module.name
        for module in modules()
        if module.name.startswith("caldrix_protocol") and {"os", "pathlib"} & set(module.imports())
    ]
    assert users == ["caldrix_protocol.address", "caldrix_protocol.build"]


def test_kernels_open_no_library_and_run_no_compiler() -> None:
    faults = [
        f"{module.name} {name}"
        for module in modules()
        if module.name.startswith("caldrix_kernels")
        for name in {*module.imports(), *(name for name, _ in module.calls())}
        if name.split(".")[0] in {"ctypes", "cffi", "subprocess", "os", "socket", "open"}
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("caldrixd.lanes", r"llama|qwen|mistral|smollm"),
        ("caldrixd.engine", r"llama|qwen|mistral|smollm|template|detoken"),
        ("caldrixd.plan", r"llama|qwen|mistral|smollm"),
        ("caldrixd.architectures", r"\b(cpu|hip|metal|cuda|numba|avx\w*)\b"),
    ],
)
def test_a_package_does_not_name_what_it_must_not_know(package: str, words: str) -> None:
    found = [
        f"{module.name}: {match[0]}"
        for module in modules()
        if module.name.startswith(package)
        for match in re.finditer(words, code_of(module), re.IGNORECASE)
    ]
    assert found == []


def code_of(module: Module) -> str:
    """The module without docstrings and comments."""
    tree = ast.parse(module.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                first.value.value = ""
    return ast.unparse(tree)


def test_module_globals_stay_as_they_were_made() -> None:
    assert [fault for module in modules() for fault in global_changes(module)] == []


@pytest.mark.parametrize(
    "text",
    [
        "cache = {}",
        "names: list[str] = []",
        "seen = set()",
        "table = {1: 2}\ndef put(key):\n    table[key] = 1",
        "table = {1: 2}\ndef put(key):\n    del table[key]",
        "names = ['a']\ndef put(name):\n    names.append(name)",
        "count = 0\ndef up():\n    global count\n    count += 1",
        "import functools\n@functools.cache\ndef load(): ...",
    ],
)
def test_a_global_that_changes_is_seen(text: str) -> None:
    assert list(global_changes(Module("sample", ROOT, text, ast.parse(text))))


def test_a_local_name_may_change() -> None:
    text = "table = {1: 2}\ndef build():\n    table = {}\n    table[1] = 2\n    return table"
    assert list(global_changes(Module("sample", ROOT, text, ast.parse(text)))) == []


def global_changes(module: Module) -> Iterator[str]:
    """Places where a function changes, or could be made to change, a name of its module."""
    names = {name for statement in module.tree.body for name in bound_names(statement)}
    for statement in module.tree.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and is_empty_container(statement.value):
            yield f"{module.name}:{statement.lineno} begins empty, so something fills it"
    for function in module.functions():
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                yield f"{module.name}:{node.lineno} global"
            target = changed_name(node)
            if target in names and target not in local_names(function):
                yield f"{module.name}:{getattr(node, 'lineno', 0)} changes {target}"
        for decorator in function.decorator_list:
            call = decorator.func if isinstance(decorator, ast.Call) else decorator
            if dotted(call).split(".")[-1] in {"cache", "lru_cache"}:
                yield f"{module.name}:{function.lineno} a cache that nobody owns"


def bound_names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


def is_empty_container(value: ast.expr | None) -> bool:
    if isinstance(value, ast.List | ast.Set):
        return not value.elts
    if isinstance(value, ast.Dict):
        return not value.keys
    return isinstance(value, ast.Call) and dotted(value.func) in {"list", "dict", "set"} and not value.args


def changed_name(node: ast.AST) -> str:
    """The plain name whose contents a node changes, or ""."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
        return dotted(node.func.value)
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        return dotted(node.value)
    return ""


def local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = function.args
    names = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs, *arguments.posonlyargs)}
    return names | {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def test_files_are_short() -> None:
    long = {
        module.name: lines
        for module in (*modules(), *files_of_tests())
        if (lines := module.text.count("\n")) > LONGEST_FILE
    }
    assert long.keys() == LONG_FILES.keys(), long


def test_functions_are_short() -> None:
    long = {
        f"{module.name}.{function.name}": length
        for module in (*modules(), *files_of_tests())
        for function in module.functions()
        if function.end_lineno and (length := function.end_lineno - function.lineno + 1) > LONGEST_FUNCTION
    }
    assert long.keys() == LONG_FUNCTIONS.keys(), long


def test_no_test_sleeps() -> None:
    names = {"time.sleep", "sleep", "anyio.sleep", "asyncio.sleep"}
    sleepers = [
        f"{module.name}:{node.lineno}"
        for module in files_of_tests()
        if not module.name.startswith("tests.bench")
        for name, node in module.calls()
        if name in names
    ]
    assert sleepers == []


def test_no_unfinished_work_is_marked() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    this = ROOT / "tests/structure/test_absences.py"
    found = [m.name for m in (*modules(), *files_of_tests()) if m.path != this and marks.search(m.text)]
    assert found == []
