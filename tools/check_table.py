"""check_table.py: docs/transformer_engine.md and docs/automodel.md, the tables of others' names and te.h's, against the public headers and the tests. Needs Python alone.

    python3 tools/check_table.py                     fails on a row that is wrong; prints how many are exercised
    python3 tools/check_table.py --update            writes a test into each row that lacks one, or whose test does not exercise it (any more)
    python3 tools/check_table.py --checkout FOLDER   lists what a checkout of TransformerEngine has and its page lacks

A row is | theirs | ours | exercised by | what differs |. Ours is a list of names, or - where te.h leaves something out, which needs a reason:

    te_function  te_function(parameter)  te_struct.field.field  te_type  TE_ENUMERATOR  TE_MACRO

Each must be in the headers. `exercised by` names a test of tests/ (TE_TEST, TE_TEST_DEVICES) that exercises the first name: in the test, and in the functions, tables and test headers
that it reaches, the function is called, the parameter is given a value that is not its zero, the field is set to one (or read, in a struct that te.h fills), the type or enumerator
stands; a row of a class's argument needs a test that makes that module. A test of what is refused, by its name, does not count. `make TARGET` names a gate beside them, whose program in
tools/ or examples/ has the name. A name that te.h refuses so far says `later: ` and a piece of the error that refuses it, which must stand in src/; NOT_YET is the error of fields whose
comment begins with "not yet", and of these alone.
"""
import ast
import pathlib
import re
import sys

import header

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = (ROOT / "docs/transformer_engine.md", ROOT / "docs/automodel.md")
NOT_YET = "is not there yet"
ZERO = {"0", "0.0f", "0.f", "0u", "false", "NULL", "", "TE_ZERO"}


# ---- the table ----

class Row:
    def __init__(self, page, line, section, cells):
        self.page, self.line, self.section = page, line, section
        self.theirs, ours, self.test, self.note = cells
        self.ours = [] if ours == "-" else [name.strip() for name in ours.split(",") if name.strip()]
        self.module = ""
        self.left_out = ours == "-"
        self.later = self.test[len("later:"):].strip() if self.test.startswith("later:") else ""


def read_table(page):
    """The parts of the page, a path, in order: ("heading", title), ("text", a paragraph), ("rows", [Row])."""
    parts, section = [], ""
    lines = page.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            section = line.lstrip("#").strip()
            parts.append(("heading", section))
        elif line.startswith("|"):
            cells = [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
            if re.fullmatch(r"[-: ]+", cells[0]) or re.match(r"\|[-: ]+\|", "".join(lines[number:number + 1])):
                continue  # the line below the head of a table, and the head
            if len(cells) != 4:
                raise SystemExit("%s:%d: %d cells in place of 4: theirs, ours, exercised by, what differs" % (page, number, len(cells)))
            if not parts or parts[-1][0] != "rows":
                parts.append(("rows", []))
            parts[-1][1].append(Row(page, number, section, cells))
        elif line.strip():
            if parts and parts[-1][0] == "text" and lines[number - 2].strip():
                parts[-1] = ("text", parts[-1][1] + "\n" + line)
            else:
                parts.append(("text", line))
    return parts


def rows_of(parts):
    """All rows; one that speaks of an argument or a method of a class gets its module: te_linear, where the class's own row says te_linear_create."""
    rows = [row for kind, value in parts if kind == "rows" for row in value]
    modules = {row.theirs: row.ours[0][:-len("_create")] for row in rows if row.ours and row.ours[0].endswith("_create")}
    for row in rows:
        row.module = next((modules[name] for name in (re.match(r"(?:ops\.)?\w*", row.theirs).group(0),) if name in modules and name != row.theirs), "")
    return rows


# ---- te.h's names ----

class Names:
    """Everything that the public headers declare, by name."""

    def __init__(self, chapters):
        self.functions, self.types, self.structs, self.zeros, self.all = {}, {}, {}, set(), {}
        for chapter in chapters:
            for d in chapter.declarations:
                self.all[d.name] = d
                if d.kind == "function":
                    self.functions[d.name] = d
                elif d.kind in ("struct", "union"):
                    self.structs[d.name] = self.types[d.name] = d
                elif d.kind in ("type", "enum"):
                    self.types[d.name] = d
                for i, row in enumerate(d.rows if d.kind == "enum" else []):
                    for name in row.names:
                        self.all[name] = d
                        if row.code.endswith("= 0") or (i == 0 and "=" not in row.code):
                            self.zeros.add(name)
                if d.name.startswith("TE_OP_LIST_"):
                    for lower, upper in re.findall(r"X\((\w+), (\w+), \w+\)", d.code):
                        self.functions["te_op_" + lower] = self.all["te_op_" + lower] = self.all["TE_OP_" + upper] = d

    def field(self, path):
        """The statement that declares te_struct.field.field, or an error."""
        first, *rest = path.split(".")
        row, at = None, self.structs.get(first)
        if not at:
            return None, "%s is no struct of te.h" % first
        for name in rest:
            if at is None:
                return None, "%s: what stands before .%s is no struct of te.h" % (path, name)
            row = next((r for r in at.rows if name in r.names), None)
            if not row:
                return None, "%s has no field %s" % (at.name, name)
            of = re.search(r"\bte_\w+", row.code)
            at = self.structs.get(of.group(0)) if of else None
        return row, ""

    def group_of(self, path):
        """te_gemm_options.no_bias of te_linear_desc.gemm.no_bias: the struct that declares a field, and the field."""
        before, _, leaf = path.rpartition(".")
        if "." not in before:
            return path
        return re.search(r"\bte_\w+", self.field(before)[0].code).group(0) + "." + leaf

    def not_yet(self, path):
        """Does the comment of a field, or of a group that it stands in, begin with "not yet"?"""
        parts = path.split(".")
        rows = [self.field(".".join(parts[:n]))[0] for n in range(2, len(parts) + 1)]
        return any(header.prose(row.comment).startswith("not yet") for row in rows)

    def resolve(self, name):
        """An error, or ""."""
        call = re.fullmatch(r"(te_\w+)\((\w+)\)", name)
        if call:
            if call.group(1) not in self.functions:
                return "te.h has no function %s" % call.group(1)
            if call.group(2) not in self.functions[call.group(1)].parameters():
                return "%s has no parameter %s, but %s" % (call.group(1), call.group(2), ", ".join(self.functions[call.group(1)].parameters()))
            return ""
        if "." in name:
            return self.field(name)[1]
        return "" if name in self.all else "te.h has no %s" % name


# ---- the tests ----

class Suite:
    """The tests, each with the text of what it reaches: its body, and what that names of the functions, tables and macros of its file and of the test headers."""

    def __init__(self, folder):
        self.items, self.tests, self.texts = {}, {}, {}
        for path in sorted(folder.glob("*.h")) + sorted(folder.glob("*/*.[ch]")):
            items = self.items[path] = {}
            for name, body, test in self.split(header.COMMENT.sub(" ", path.read_text(encoding="utf-8"))):
                items[name] = items.get(name, "") + "\n" + body
                if test:
                    self.tests[name] = path

    @staticmethod
    def split(text):
        """(name, text, whether it is a test) of each macro, and of each declaration outside of braces."""
        for line in re.findall(r"^#\s*define\s+\w+(?:[^\n]*\\\n)*[^\n]*", text, re.M):
            yield re.match(r"#\s*define\s+(\w+)", line).group(1), line, False
        text = re.sub(r"^#(?:[^\n]*\\\n)*[^\n]*", "", text, flags=re.M)
        begin = depth = 0
        for found in re.finditer(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)+\'|[{}();]', text):
            c = found.group(0)
            depth += (c in "{(") - (c in "})")
            if depth or c not in "};":
                continue
            after = text[found.end():].lstrip()
            item = text[begin:found.end()]
            if c == "}" and (after.startswith((";", ",")) or re.match(r"\w+\s*(\[|;)", after) and not re.match(r"(static|typedef|enum|TE_TEST)", after)):
                continue  # the end of a table or of a type, which goes on to its semicolon
            begin = found.end()
            test = re.match(r"\s*TE_TEST(?:_DEVICES)?\((\w+)\)", item)
            named = test or re.match(r"[^=;{]*?(\w+)\s*(?:\[[^=]*\])?\s*=", item) or re.match(r"[^({]*?(\w+)\s*\(", item) or re.search(r"(\w+)\s*;$", item)
            if named:
                yield named.group(1), item, bool(test)

    def text(self, test):
        if test not in self.texts:
            path = self.tests[test]
            places = [self.items[path]] + [items for p, items in self.items.items() if p.suffix == ".h" and (p.parent == path.parent or p.parent.name == "tests")]
            reached, waiting, out = set(), [test], []
            while waiting:
                name = waiting.pop()
                if name in reached:
                    continue
                reached.add(name)
                body = next((items[name] for items in places if name in items), None)
                if body:
                    out.append(body)
                    waiting += re.findall(r"\b[A-Za-z_]\w*", body)
            self.texts[test] = "\n".join(out)
        return self.texts[test]


def arguments(text, function):
    """The arguments of each call of a function."""
    for found in re.finditer(r"\b%s\s*\(" % function, text):
        depth, args = 1, [""]
        for c in re.findall(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)+\'|.|\n', text[found.end():found.end() + 4000]):
            depth += (c in "({[") - (c in ")}]")
            if depth == 0:
                break
            if c == "," and depth == 1:
                args.append("")
            else:
                args[-1] += c
        yield [a.strip() for a in args]


def set_somewhere(names, text, before, leaf):
    """Is a field given a value that is not its zero? `before` is a pattern of what stands in front of its name."""
    for found in re.finditer(before + r"%s(?:\.\w+)*\s*(?:\[[^]]*\]\s*)?=(?!=)\s*(?:[\w.>\[\]-]+\s*=(?!=)\s*)*([^,;})\s]*)" % leaf, text):
        if found.group(1) not in ZERO and found.group(1) not in names.zeros:
            return True
    return False


def exercises(names, text, name):
    """Does a test with this text exercise the name?"""
    if (name.partition("(")[0] if "(" in name else name.rpartition(".")[2]) not in text:  # most do not, and this is quick
        return False
    call = re.fullmatch(r"(te_\w+)\((\w+)\)", name)
    if call:
        at = names.functions[call.group(1)].parameters().index(call.group(2))
        return any(len(args) > at and args[at] not in ZERO and args[at] not in names.zeros for args in arguments(text, call.group(1)))
    if "." not in name:
        return re.search(r"\b%s\b" % name + (r"\s*[(,}]" if name in names.functions else ""), text) is not None
    path = name.split(".")
    if path[0] == "te_outputs":
        return re.search(r"\boutputs\.%s\b" % path[1], text) is not None
    if not re.search(r"\b%s\b" % path[0], text) and not re.search(r"\b%s\b" % re.sub(r"_desc$", "_create", path[0]), text):
        return False
    leaf = path[-1]
    # A struct that te.h fills in is read; a field of the caller's may also be filled by its address.
    if path[0] in FILLED:
        return re.search(r"(?:\.|->)%s\b" % leaf, text) is not None
    if len(path) == 2:
        return set_somewhere(names, text, r"(?:\.|->)", leaf) or re.search(r"&\w+(?:\.|->)%s\b" % leaf, text) is not None
    group, kind = path[-2], names.group_of(name).partition(".")[0]
    return (set_somewhere(names, text, r"(?:\.|->)%s\." % group, leaf)
            or any(set_somewhere(names, inner, r"\.", leaf) for inner in re.findall(r"\.%s\s*=\s*(?:\(\w+\))?\{([^}]*)" % group, text))
            or re.search(r"\b%s\s+\*?\w+" % kind, text) is not None and set_somewhere(names, text, r"(?:\.|->)", leaf))


# Names of tests of what is refused. They do not count: a value that is refused shows nothing of what the option does.
REFUSAL = "complain|refus|wrong|illegal|invalid|error|exclude|misuse|not_yet|cannot|damage|memory_runs_out|memory_fails|starved|does_not_fit|failed"

# Structs that te.h fills in.
FILLED = {"te_moe_padded", "te_quant_stats", "te_memory_stats", "te_explanation", "te_quantizer_role"}


def exercises_row(names, text, row):
    """Does it exercise the row's first name, in the module that the left side speaks of?"""
    return exercises(names, text, row.ours[0]) and (not row.module or re.search(r"\b%s(_create|_desc)\b" % row.module, text) is not None)


def suggest(names, suite, row):
    """The test that tells most of the row: named for it, in a room that fits, and no longer than it need be."""
    leaf = re.sub(r".*[.(]", "", row.ours[0]).rstrip(")").lower()
    words = [w for w in re.split(r"_+", re.sub(r"^(te|no)_", "", leaf)) if len(w) > 2]
    best = (None, None)
    for test, path in suite.tests.items():
        text = suite.text(test)
        if re.search(REFUSAL, test) or not exercises_row(names, text, row):
            continue
        room = path.parent.name
        score = 6 * sum(w in test for w in words) / max(1, len(words)) + (room in ("nn", "train", "quant", "io", "dist")) - 2 * (room in ("faults", "bench")) - len(text) / 20000
        if best[0] is None or score > best[0]:
            best = (score, test)
    return best[1]


# ---- TransformerEngine's own names ----

def their_names(folder):
    """Class(argument), Class.method(argument), function(argument), Enum.value of a checkout: of what its documentation lists, and what its public modules export."""
    pytorch = folder / "transformer_engine/pytorch"
    members = {}
    for page in ("pytorch", "common"):
        text = (folder / ("docs/api/%s.rst" % page)).read_text()
        for found in re.finditer(r"autoapi(?:class|function):: transformer_engine\.([\w.]+)[^\n]*((?:\n\s+:members:[^\n]*)?)", text):
            full = ("ops." if ".ops." in found.group(1) else "") + found.group(1).split(".")[-1]
            members[full] = [m.strip() for m in found.group(2).replace(":members:", "").split(",") if m.strip() and not m.strip().startswith("_")]
    for exports, prefix in EXPORTS.items():
        for node in ast.walk(ast.parse((pytorch / exports).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith(("transformer_engine.pytorch.", "transformer_engine_torch"))):
                for name in node.names:
                    if not name.name.startswith("_") and name.name not in NO_API:
                        members.setdefault(prefix + name.name, [])
    for module in MODULES:
        for node in ast.parse((pytorch / module).read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                members.setdefault(node.name, [])
    index = {}
    for path in list(pytorch.rglob("*.py")) + list((folder / "transformer_engine/common/recipe").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                index.setdefault(("ops." if "/ops/" in str(path) else "") + node.name, node)

    def arguments_of(label, node):
        return ["%s(%s)" % (label, a.arg) for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs if a.arg not in ("self", "cls") and not a.arg.startswith("_")]

    names = []
    for label, methods in members.items():
        names.append(label)
        node = index.get(label)
        if isinstance(node, ast.FunctionDef):
            names += arguments_of(label, node)
        for item in node.body if isinstance(node, ast.ClassDef) else []:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                names += arguments_of(label, item)
            elif isinstance(item, ast.FunctionDef) and (item.name == "forward" or item.name in methods):
                names += ([] if item.name == "forward" else [label + "." + item.name]) + arguments_of(label + "." + item.name, item)
            elif isinstance(item, ast.AnnAssign) and any(isinstance(d, ast.Call) or isinstance(d, ast.Name) for d in node.decorator_list) and not item.target.id.startswith("_"):
                names.append("%s(%s)" % (label, item.target.id))
            elif isinstance(item, ast.Assign) and any("Enum" in ast.unparse(base) for base in node.bases):
                names.append("%s.%s" % (label, ast.unparse(item.targets[0])))
    return names


# Where TransformerEngine's public names stand, and what its front door imports that is no part of it.
EXPORTS = {"__init__.py": "", "optimizers/__init__.py": "", "ops/basic/__init__.py": "ops.", "ops/__init__.py": "ops."}
MODULES = ("router.py", "tensor/utils.py")
NO_API = {"torch_version", "constants", "ops", "optimizers", "fused", "*"}


# ---- the check ----

class Evidence:
    """The names of the headers and the tests, and as texts the sources of the library, the Makefile, and the programs of tools/ and examples/."""

    def __init__(self, names, suite, sources, makefile, programs):
        self.names, self.suite, self.sources, self.makefile, self.programs = names, suite, sources, makefile, programs

    def fault(self, row):
        """The error of a row's third column, or ""."""
        not_yet = self.names.not_yet(row.ours[0])
        if row.later:
            if row.later not in self.sources:
                return 'no error of src/ says "%s"; --update looks for a test' % row.later
            if row.later == NOT_YET and "." in row.ours[0] and not not_yet:
                return "is marked `later`, and its comment in the header does not begin with \"not yet\"; --update looks for a test"
            return ""
        if not_yet:
            return "its comment in the header begins with \"not yet\"; --update says `later`"
        if not row.test:
            return "names no test; --update looks for one"
        if row.test.startswith("make "):
            if not re.search(r"(?m)^%s:" % re.escape(row.test[len("make "):]), self.makefile):
                return "the Makefile has no %s" % row.test
            found = re.search(r"\b%s\b" % re.split(r"[(.]", row.ours[0])[0], self.programs)
            return "" if found else "no program of tools/ and examples/ has %s" % row.ours[0]
        if row.test not in self.suite.tests:
            return "tests/ has no test %s; --update looks for another" % row.test
        if re.search(REFUSAL, row.test):
            return "%s is a test of what te.h refuses, by its name; --update looks for another" % row.test
        if not exercises_row(self.names, self.suite.text(row.test), row):
            return "%s (%s) does not exercise %s%s" % (row.test, self.suite.tests[row.test].relative_to(ROOT), row.ours[0], " in a " + row.module if row.module else "")
        return ""


def check(parts, evidence):
    """(errors, exercised, later) of the rows."""
    errors, exercised, later, seen = [], 0, 0, {}
    for row in rows_of(parts):
        wrong = []
        if not row.theirs:
            wrong.append("the left side is empty")
        if row.theirs in seen:
            wrong.append("stands in line %d, too" % seen[row.theirs])
        seen[row.theirs] = row.line
        if row.left_out:
            wrong += ["is left out without a reason"] * (not row.note) + ["is left out, and names a test"] * bool(row.test)
        elif not row.ours:
            wrong.append("the right side is empty; - says that te.h leaves it out")
        else:
            unknown = [error for error in map(evidence.names.resolve, row.ours) if error]
            fault = "" if unknown else evidence.fault(row)
            wrong += unknown + [fault] * bool(fault)
            later += bool(row.later)
            exercised += not unknown and not fault and not row.later
        errors += ["%s:%d: %s: %s" % (row.page.relative_to(ROOT), row.line, row.theirs or "(no name)", text) for text in wrong]
    return errors, exercised, later


def update(page, evidence):
    """Writes a test into each row of a page whose third column is wrong, or `later`; and into those of enumerators that are later no more, which no comment tells. Returns what it wrote."""
    written = []
    names, suite = evidence.names, evidence.suite
    lines = page.read_text(encoding="utf-8").split("\n")
    for row in rows_of(read_table(page)):
        if row.left_out or not row.ours or any(map(names.resolve, row.ours)):
            continue
        if evidence.fault(row) or (row.later and "." not in row.ours[0]):
            found = "later: " + NOT_YET if names.not_yet(row.ours[0]) else suggest(names, suite, row)
            if found and found != row.test:
                written.append("%s: %s" % (row.theirs, found))
                lines[row.line - 1] = "| %s | %s | %s | %s |" % (row.theirs, ", ".join(row.ours), found, row.note)
    page.write_text("\n".join(lines), encoding="utf-8")
    return written


def main(args):
    if args[:1] == ["--checkout"]:
        have = {row.theirs: row for row in rows_of(read_table(PAGES[0]))}
        # Of what is left out as a whole, arguments, methods and values need no row of their own.
        out = {name for name, row in have.items() if row.left_out}
        lacking = [name for name in their_names(pathlib.Path(args[1])) if name not in have and not {name.split("(")[0], name.split("(")[0].rpartition(".")[0]} & out]
        print("\n".join(lacking + ["%d names of TransformerEngine are not in the table" % len(lacking)]))
        return 1 if lacking else 0

    def texts(*patterns):
        return "\n".join(path.read_text(encoding="utf-8") for pattern in patterns for path in sorted(ROOT.glob(pattern)))

    names = Names([header.read(path) for path in sorted((ROOT / "src/api").glob("*.h"))])
    evidence = Evidence(names, Suite(ROOT / "tests"), texts("src/**/*.c"), texts("Makefile"), texts("tools/**/*.c", "examples/*.c"))
    failed = False
    for page in PAGES:
        if args == ["--update"]:
            for line in update(page, evidence):
                print(line)
        parts = read_table(page)
        errors, exercised, later = check(parts, evidence)
        for error in errors:
            print(error)
        rows = rows_of(parts)
        out = sum(row.left_out for row in rows)
        failed = failed or bool(errors)
        print("%s: %d of %d rows are exercised by tests, %d later; %d that te.h leaves out" % (page.name, exercised, len(rows) - out, later, out))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
