"""check_docs.py: lists the declarations of public headers that lack a comment: functions, types, fields, enumerators, macros. Needs Python alone.

    python3 tools/check_docs.py src/api/*.h

A declaration has a comment if one stands directly above it or behind it on its line, or if the comment above its struct, enum or run of declarations
without an empty line names it. A ruler (/* ---- norm ---- */) is no comment, a macro that the same file undefines is private, and an X-list's expansion
inside an enum is commented where the list is. tests/build/check_docs_test.py holds each form.
"""
import re
import sys

COMMENT = re.compile(r"/\*(?:.|\n)*?\*/")
RULER = re.compile(r"/\* -{3,}[^\n]*-{3,} \*/")


def names_word(text, name):
    return re.search(r"(?<![\w])%s(?![\w])" % re.escape(name), text) is not None


class Header:
    def __init__(self, path, text):
        self.path = path
        self.lacking = []
        # Each line becomes its code, and the comments that begin on it (with those of a block that ends directly above the next code line).
        self.code, self.comment = [], []
        position = 0
        code, comments = [], {}
        line = 0
        for match in COMMENT.finditer(text):
            code.append(text[position:match.start()])
            line += text[position:match.start()].count("\n")
            if not RULER.fullmatch(match.group(0)):
                comments.setdefault(line, []).append((match.group(0), line + match.group(0).count("\n")))
            code.append("\n" * match.group(0).count("\n") + " ")
            line += match.group(0).count("\n")
            position = match.end()
        code.append(text[position:])
        self.lines = "".join(code).split("\n")
        self.comments = comments
        self.ends = {}  # line on which a comment ends -> its text
        for begun, found in comments.items():
            for body, end in found:
                self.ends[end] = self.ends.get(end, "") + body

    def behind(self, line):
        """The comment on a code line."""
        return " ".join(body for body, _ in self.comments.get(line, []))

    def above(self, line):
        """The comment that ends on the line before, if that line holds no code."""
        if line > 0 and not self.lines[line - 1].strip():
            return self.ends.get(line - 1, "")
        return ""

    def lacks(self, line, kind, name):
        self.lacking.append("%s:%d: %s %s" % (self.path, line + 1, kind, name))

    def group(self, line):
        """The comment above a run of code lines without a blank one between."""
        while line > 0 and self.lines[line - 1].strip():
            line -= 1
        return self.above(line)

    def check_fields(self, begin, end, kind, about):
        """Members between the braces on lines begin and end."""
        line = begin + 1
        while line < end:
            text = self.lines[line].strip()
            first = line
            if text.startswith("#") or not text:
                line += 1
                continue
            if kind == "field":
                while ";" not in self.lines[line] and line + 1 < end:
                    line += 1
                    text += " " + self.lines[line].strip()
                own = " ".join(self.behind(l) for l in range(first, line + 1)) + self.above(first)
                for statement in text.split(";"):
                    statement = re.sub(r"\(\*\s*(?:const\s+)?(\w+)\)\s*\([^;]*\)", r" \1", statement.strip())
                    if not statement or statement in "{}" or statement.endswith("{"):
                        continue
                    for part in statement.split(","):
                        found = re.search(r"(\w+)\s*(?:\[[^]]*\]\s*)*$", part.strip())
                        if found and not own.strip() and not names_word(about + self.group(first), found.group(1)):
                            self.lacks(first, kind, found.group(1))
            else:
                own = self.behind(line) + self.above(line)
                for part in text.strip("{},").split(","):
                    found = re.match(r"\s*(TE_\w+)(?!\w|\s*\()", part)
                    if found and not found.group(1).endswith("_COUNT") and not own.strip() and not names_word(about, found.group(1)):
                        self.lacks(line, kind, found.group(1))
            line += 1

    def check(self):
        line = 0
        private = set(re.findall(r"^\s*#\s*undef\s+(TE_\w+)", "\n".join(self.lines), re.M))
        while line < len(self.lines):
            text = self.lines[line].strip()
            begin = line
            typed = re.match(r"(?:typedef\s+)?(struct|enum|union)\s+(te_\w+\s*)?\{", text)
            named = re.match(r"typedef\s[^({]*\b(te_\w+)\s*;", text)
            if typed:
                kind, name = typed.group(1), (typed.group(2) or "without a name").strip()
                about = self.above(line) or (self.group(line) if names_word(self.group(line), name) else "")
                depth = text.count("{") - text.count("}")
                while depth > 0:
                    line += 1
                    depth += self.lines[line].count("{") - self.lines[line].count("}")
                if line == begin:  # on one line: its comment may stand behind it
                    about += self.behind(line)
                    members = text[text.index("{") + 1:text.rindex("}")]
                    if not about.strip():
                        self.lacks(begin, kind, name)
                    elif kind == "enum":
                        for member in members.split(","):
                            found = re.match(r"\s*(TE_\w+)", member)
                            if found and not self.behind(line).strip() and not names_word(about, found.group(1)):
                                self.lacks(begin, "enumerator", found.group(1))
                else:
                    if not about.strip() and not self.behind(begin).strip():
                        self.lacks(begin, kind, name)
                    self.check_fields(begin, line, "enumerator" if kind == "enum" else "field", about + self.behind(begin))
            elif text.startswith("TE_API"):
                while ";" not in self.lines[line]:
                    line += 1
                whole = " ".join(self.lines[begin:line + 1])
                found = re.search(r"(te_\w+)\s*\(", whole)
                if found and "##" not in whole:
                    own = self.above(begin) + " ".join(self.behind(l) for l in range(begin, line + 1))
                    if not own.strip() and not names_word(self.group(begin), found.group(1)):
                        self.lacks(begin, "function", found.group(1))
            elif named:
                if not (self.above(begin) + self.behind(begin)).strip() and not names_word(self.group(begin), named.group(1)):
                    self.lacks(begin, "type", named.group(1))
            elif text.startswith("typedef") and "(*" in text:
                found = re.search(r"\(\*\s*(te_\w+)\)", text)
                if found and not (self.above(begin) + self.behind(begin)).strip() and not names_word(self.group(begin), found.group(1)):
                    self.lacks(begin, "type", found.group(1))
                while ";" not in self.lines[line]:
                    line += 1
            elif re.match(r"#\s*define\s+TE_\w+", text):
                name = re.match(r"#\s*define\s+(TE_\w+)", text).group(1)
                while self.lines[line].rstrip().endswith("\\"):
                    line += 1
                own = self.above(begin) + " ".join(self.behind(l) for l in range(begin, line + 1))
                if name not in private and not own.strip() and not names_word(self.group(begin), name):
                    self.lacks(begin, "macro", name)
            line += 1
        return self.lacking


def main(paths):
    lacking = []
    for path in paths:
        with open(path, encoding="utf-8") as f:
            lacking += Header(path, f.read()).check()
    for line in lacking:
        print(line)
    if lacking:
        print("%d public declarations lack a comment: shape, format, unit, ownership, errors, source, whichever apply" % len(lacking))
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if sys.argv[1:] else __doc__)
