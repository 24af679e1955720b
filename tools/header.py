"""header.py: the public headers as declarations with their comments: functions, types, fields, enumerators, macros. Needs Python alone.

A declaration has a comment if one stands directly above it or behind it on its line, or if the comment above its struct, enum or run of declarations
without an empty line names it. A ruler (/* ---- norm ---- */) begins a section and is no comment, a macro that the same file undefines is private, and an
X-list's expansion inside an enum is commented where the list is. tests/build/check_docs_test.py holds each form.
"""
import re

COMMENT = re.compile(r"/\*(?:.|\n)*?\*/")
RULER = re.compile(r"/\* -{3,}\s*([^\n]*?)\s*-{3,} \*/")
TITLED = re.compile(r"/\* -{3,}\s*([^\n]*?)\s*-{3,}\n \*")  # a ruler with text below it, in one comment


def names_word(text, name):
    return re.search(r"(?<![\w])%s(?![\w])" % re.escape(name), text) is not None


def prose(comment):
    """The text of one or more comments, without their marks; indentation beyond that of the comment stays."""
    blocks = []
    for body in COMMENT.findall(comment):
        lines = body[2:-2].rstrip().split("\n")
        rest = [re.sub(r"^\s*\*( |$)", "", line) for line in lines[1:]]
        blocks.append("\n".join([lines[0].lstrip()] + rest))
    return "\n".join(blocks)


class Row:
    """A statement in a struct, or an enumerator: several names may share it. `documented` has those of them that a comment tells of."""

    def __init__(self, kind, line, code, comment, names, documented):
        self.kind, self.line, self.code, self.comment, self.names, self.documented = kind, line, code, comment, names, documented


class Declaration:
    def __init__(self, kind, name, line, end, code, comment):
        self.kind, self.name, self.line, self.end, self.code, self.comment = kind, name, line, end, code, comment
        self.rows = []

    def parameters(self):
        """The names of a function's parameters, in order."""
        inside = self.code[self.code.index("(") + 1:self.code.rindex(")")]
        depth, parts = 0, [""]
        for c in inside:
            depth += (c == "(") - (c == ")")
            if c == "," and depth == 0:
                parts.append("")
            else:
                parts[-1] += c
        found = [re.search(r"\(\*\s*(?:const\s+)?(\w+)\)\s*\(", p) or re.search(r"(\w+)\s*(?:\[[^]]*\]\s*)*$", p.strip()) for p in parts]
        return [f.group(1) for f in found if f and f.group(1) != "void"]


class Header:
    def __init__(self, path, text):
        self.path = path
        # Each line becomes its code; comments are kept by the line on which they begin, and by the line on which they end.
        position, line = 0, 0
        code, self.comments, self.ends, self.begins, self.rulers, self.intro = [], {}, {}, {}, {}, ""
        for match in COMMENT.finditer(text):
            body = match.group(0)
            code.append(text[position:match.start()])
            line += text[position:match.start()].count("\n")
            end = line + body.count("\n")
            if RULER.fullmatch(body):
                self.rulers[line] = RULER.fullmatch(body).group(1)
            else:
                if line == 0 and not "".join(code).strip():
                    self.intro = body
                self.comments.setdefault(line, []).append(body)
                self.ends[end] = self.ends.get(end, "") + body
                self.begins.setdefault(end, line)
            code.append("\n" * body.count("\n") + " ")
            line = end
            position = match.end()
        code.append(text[position:])
        self.lines = "".join(code).split("\n")
        self.private = set(re.findall(r"^\s*#\s*undef\s+(TE_\w+)", "\n".join(self.lines), re.M))
        self.declarations = list(self.read())

    def blocks(self):
        """The header in the order of reading: ("section", its title), ("text", a comment of its own), ("declaration", the Declaration)."""
        found, used = [], set()
        for d in self.declarations:
            found.append((d.line, "declaration", d))
            used.update(range(d.line, d.end + 1))
            if self.above(d.line):
                used.add(self.begins[d.line - 1])
        for line, bodies in self.comments.items():
            titled = TITLED.match(bodies[0])
            if titled:
                found.append((line, "section", titled.group(1)))
            if line not in used and bodies[0] != self.intro and not self.lines[line].strip():
                found.append((line + 0.5, "text", TITLED.sub("/*", bodies[0])))
        found += [(line, "section", title) for line, title in self.rulers.items()]
        return [(kind, value) for _, kind, value in sorted(found, key=lambda entry: entry[0])]

    def behind(self, begin, end=None):
        """The comments on code lines."""
        return " ".join(body for line in range(begin, (begin if end is None else end) + 1) for body in self.comments.get(line, []))

    def above(self, line):
        """The comment that ends on the line before, if that line holds no code."""
        if line > 0 and not self.lines[line - 1].strip():
            return self.ends.get(line - 1, "")
        return ""

    def group(self, line):
        """The comment above a run of code lines without a blank one between."""
        while line > 0 and self.lines[line - 1].strip():
            line -= 1
        return self.above(line)

    def code(self, begin, end):
        return "\n".join(line.rstrip() for line in self.lines[begin:end + 1] if line.strip())

    def comment_of(self, name, begin, end):
        """Of a declaration: its own comment, or that of its run, which must name it."""
        own = self.above(begin) + self.behind(begin, end)
        if own.strip():
            return own
        return self.group(begin) if names_word(self.group(begin), name) else ""

    def fields(self, begin, end, about):
        """The statements between the braces on lines begin and end."""
        line = begin + 1
        while line < end:
            text = self.lines[line].strip()
            first = line
            if text and not text.startswith("#"):
                while ";" not in self.lines[line] and line + 1 < end:
                    line += 1
                    text += " " + self.lines[line].strip()
                own = (self.above(first) + self.behind(first, line)).strip()
                for statement in text.split(";"):
                    short = re.sub(r"\(\*\s*(?:const\s+)?(\w+)\)\s*\([^;]*\)", r" \1", statement.strip())
                    if not short or short in "{}" or short.endswith("{"):
                        continue
                    names = [f.group(1) for f in (re.search(r"(\w+)\s*(?:\[[^]]*\]\s*)*$", part.strip()) for part in short.split(",")) if f]
                    yield Row("field", first, statement.strip() + ";", own, names, [n for n in names if own or names_word(about + self.group(first), n)])
            line += 1

    def enumerators(self, begin, end, about):
        """Those between the braces on lines begin and end, or on one line."""
        for line in range(begin + 1, end) if end > begin else [begin]:
            text = self.lines[line].strip()
            if end == begin:
                text = text[text.index("{") + 1:text.rindex("}")]
            if text.startswith("#"):
                continue
            own = (self.behind(line) + ("" if end == begin else self.above(line))).strip()
            for part in text.strip("{},").split(","):
                found = re.match(r"\s*(TE_\w+)(?!\w|\s*\()", part)
                if found:
                    name = found.group(1)
                    told = own or name.endswith("_COUNT") or names_word(about, name)
                    yield Row("enumerator", line, part.strip(), own, [name], [name] if told else [])

    def read(self):
        line = 0
        while line < len(self.lines):
            text = self.lines[line].strip()
            begin = line
            typed = re.match(r"(?:typedef\s+)?(struct|enum|union)\s+(te_\w+\s*)?\{", text)
            named = re.match(r"typedef\s[^({]*\b(te_\w+)\s*;", text)
            macro = re.match(r"#\s*define\s+(TE_\w+)", text)
            if typed:
                kind, name = typed.group(1), (typed.group(2) or "without a name").strip()
                about = self.above(line) or (self.group(line) if names_word(self.group(line), name) else "")
                depth = text.count("{") - text.count("}")
                while depth > 0:
                    line += 1
                    depth += self.lines[line].count("{") - self.lines[line].count("}")
                about += self.behind(begin)
                found = Declaration(kind, name, begin, line, self.code(begin, line), about)
                if kind == "enum":
                    found.rows = list(self.enumerators(begin, line, about))
                elif line > begin:
                    found.rows = list(self.fields(begin, line, about))
                yield found
            elif text.startswith("TE_API"):
                while ";" not in self.lines[line]:
                    line += 1
                whole = self.code(begin, line)
                found = re.search(r"(te_\w+)\s*\(", whole)
                if found and "##" not in whole:
                    yield Declaration("function", found.group(1), begin, line, whole, self.comment_of(found.group(1), begin, line))
            elif named:
                yield Declaration("type", named.group(1), begin, line, text, self.comment_of(named.group(1), begin, line))
            elif text.startswith("typedef") and "(*" in text:
                while ";" not in self.lines[line]:
                    line += 1
                found = re.search(r"\(\*\s*(te_\w+)\)", text)
                if found:
                    yield Declaration("type", found.group(1), begin, line, self.code(begin, line), self.comment_of(found.group(1), begin, begin))
            elif macro:
                while self.lines[line].rstrip().endswith("\\"):
                    line += 1
                if macro.group(1) not in self.private:
                    yield Declaration("macro", macro.group(1), begin, line, self.code(begin, line), self.comment_of(macro.group(1), begin, line))
            line += 1


def read(path):
    with open(path, encoding="utf-8") as f:
        return Header(path, f.read())
