"""docs.py: the manual of te.h, from the comments of the public headers and the tables of names in docs/, as one HTML page that needs nothing else.

    python docs.py OUT.html            with the packages of requirements.txt: make docs

Every name has an anchor (te_linear_create, te_linear_desc.in_features, TE_RMSNORM), and every mention of one elsewhere is a link. The search looks through the elements that have data-name:
declarations, rows, and prose by its headings. The page is checked as it is written: valid HTML, no anchor twice, no link without an end, nothing from outside, a title of its own for each
chapter, and no text that the search would not find.
"""
import html
import pathlib
import re
import sys

import html5lib
from jinja2 import Environment, FileSystemLoader
from markdown_it import MarkdownIt
from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CLexer

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE.parent))
import check_table
import header

TITLES = {
    "manual": "te.h", "enums": "Choices", "base": "Version, formats, results", "context": "Context", "tensor": "Tensors", "autograd": "Tape, checkpoints, offload",
    "ops": "Raw operations", "ops_quant": "Raw operations that quantize", "ops_moe": "Raw operations of experts", "ops_model": "Raw operations of models", "ops_train": "Raw operations of training", "trace": "Trace",
    "dist": "Groups of ranks", "quant": "Quantizers, recipes, autocast", "options": "Options", "functions": "Functions", "attention_keys": "Attention to some of the keys", "module": "Module tree", "backends": "Implementations to choose among", "step": "The place in a training step", "nn": "Modules",
    "inference": "Inference: keys and values of earlier calls", "context_parallel": "Context parallelism", "moe": "Mixtures of experts", "train": "Optimizers, checkpoint files", "optimizer_states": "States of FusedAdam",
    "graph": "Graphs", "io": "Safetensors", "models": "Models that exist", "onnx": "ONNX files", "backend": "Backends of a model's parts",
    "attention_backends": "Attention backends", "patches": "Patches", "formats": "Number formats of models", "inject": "Attention in models that exist", "lora": "LoRA",
    "sharding": "Ranks with other data", "experts": "Gates and experts", "moe_backend": "A mixture by its backend", "report": "Warm-up, explanations, report"}

# Comments are plain text: lists, indented code and words between backticks, but no emphasis, since * and _ stand for themselves.
markdown = MarkdownIt("zero").enable(["list", "code", "lheading", "heading", "backticks"])
code_format = HtmlFormatter(nowrap=True)


class Links:
    """The anchors of all names, and mentions of them turned into links."""

    def __init__(self):
        self.anchors = {}

    def link(self, text, own=()):
        """Links in the text parts of HTML, but not inside of links, and not to what the text belongs to."""
        parts, inside = [], 0
        for part in re.split(r"(<[^>]+>)", text):
            if part.startswith("<"):
                inside += part.startswith("<a ") - (part == "</a>")
            elif not inside:
                part = re.sub(r"\b(?:te_\w+(?:\.\w+)*|TE_\w+)", lambda m: self.one(m.group(0), own), part)
            parts.append(part)
        return Markup("".join(parts))

    def one(self, name, own):
        path, rest = name, ""
        while path not in self.anchors and "." in path:
            path, _, last = path.rpartition(".")
            rest = "." + last + rest
        if path not in self.anchors or path in own:
            return name
        return '<a class="name" href="#%s">%s</a>%s' % (self.anchors[path], path, rest)


links = Links()


def blocks_of(text):
    """A comment as Markdown: groups of lines that are indented by two or three columns become definitions; where they are no pairs, they belong to the paragraph above,
    or are code below a colon or an empty line."""
    out, group = [], []

    def end():
        pairs = definitions(group) if group else None
        above = out[-1][1].rstrip(" ") if out and out[-1][0] == "text" else ""
        if pairs:
            out.append(("pairs", pairs))
        elif group and above and not above.endswith((":", "\n")):  # a paragraph with a hanging indent
            out[-1] = ("text", above + "\n" + "\n".join(line.strip() for line in group))
        elif group:
            out.append(("text", "\n".join("    " + line for line in group)))
        group.clear()

    lines, item = [], False
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if re.match(r"\s*- ", line):
            item = indent
        elif item is not False and (not line.strip() or indent <= item):
            item = False
        if item is False and line.strip() and (2 <= indent < 4 or (group and indent >= 2)):
            if lines:
                out.append(("text", "\n".join(lines)))
                lines = []
            group.append(line)
        else:
            end()
            # A list inside of a comment is indented by two columns; Markdown's begins at the margin.
            lines.append(line[item:] if item is not False and line[:item].strip() == "" else line)
    end()
    if lines:
        out.append(("text", "\n".join(lines)))
    return out


def definitions(group):
    """[(term, text)] of lines `  term   text`, whose text may go on below itself; None if they are something else. A term as long as its column has one space behind it."""
    first = re.match(r" +", group[0]).end()
    pair_of = re.compile(r" {%d}(\S(?:.*?\S)??) {2,}(\S.*)$" % first)
    column = next((pair.start(2) for pair in map(pair_of.match, group) if pair), 0)
    found = []
    for line in group:
        pair = pair_of.match(line)
        if pair and "   " not in pair.group(2):
            found.append([pair.group(1), pair.group(2)])
        elif found and len(line) - len(line.lstrip()) > first + 1:
            found[-1][1] += " " + line.strip()
        elif not pair and column and line[first] != " " and line[column - 1:column] == " " and line[column:column + 1].strip():
            found.append([line[first:column].rstrip(), line[column:]])
        else:
            return None
    return None if any("=" in term for term, _ in found) else found


def render(comment, own=()):
    """HTML of a comment."""
    out = []
    for kind, value in blocks_of(header.prose(comment) if comment.startswith("/*") else comment):
        if kind == "pairs":
            out.append("<dl>" + "".join("<dt>%s</dt><dd>%s</dd>" % (markdown.renderInline(a), markdown.renderInline(b)) for a, b in value) + "</dl>")
        else:
            out.append(markdown.render(value))
    return links.link("".join(out), own)


def inline(comment):
    """HTML of the comment of a field: of one paragraph without its element."""
    made = str(render(comment))
    return Markup(re.sub(r"^<p>(.*)</p>\s*$", r"\1", made)) if made.count("<p>") == 1 and "<dl>" not in made else made


def code(text, own=(), kind="code"):
    return Markup('<pre class="%s"><code class="highlight">%%s</code></pre>' % kind) % links.link(highlight(text, CLexer(), code_format).rstrip(), own)


def slug(text):
    return re.sub(r"\W+", "-", text.lower()).strip("-")


def prose(own, title, number, text):
    """A piece of text that the search finds, under the title of the heading above it."""
    return {"kind": "text", "id": "%s-text-%d" % (own, number), "name": title, "text": text}


class Page:
    def __init__(self, chapters):
        self.chapters = chapters
        for name, chapter in chapters:
            for d in chapter.declarations:
                if d.name.startswith("te_") or d.name.startswith("TE_"):
                    links.anchors.setdefault(d.name, d.name)
                for row in d.rows:
                    for each in row.names:
                        anchor = each if d.kind == "enum" else d.name + "." + each
                        links.anchors.setdefault(anchor, anchor)
            links.anchors.setdefault("api/%s.h" % name, "chapter-" + name)
        for name, chapter in chapters:  # X-lists: te_op_gemm and TE_OP_GEMM stand at te_op_gemm_args
            for d in chapter.declarations:
                if d.name.startswith("TE_OP_LIST_"):
                    for lower, upper in re.findall(r"X\((\w+), (\w+), \w+\)", d.code):
                        for each in ("te_op_" + lower, "TE_OP_" + upper):
                            links.anchors.setdefault(each, links.anchors.get("te_op_%s_args" % lower, "TE_OP_LIST"))

    def declaration(self, chapter, d, taken):
        def new(anchor):
            """The anchor the first time: a name may be declared in both branches of a condition."""
            if anchor in taken:
                return None
            taken.add(anchor)
            return anchor

        anchor = new(d.name) or d.name + "-%d" % d.line
        made = {"kind": d.kind, "names": [{"id": anchor, "name": d.name}], "comment": d.comment, "text": render(d.comment, (d.name,)), "rows": [], "code": ""}
        if d.kind in ("struct", "union", "enum") and d.rows and d.end > d.line:
            rows = [(row.line, {"kind": row.kind, "name": ", ".join(row.names) if d.kind == "enum" else ", ".join(d.name + "." + n for n in row.names),
                                "ids": [i for i in (new(n if d.kind == "enum" else d.name + "." + n) for n in row.names) if i],
                                "code": links.link(html.escape(row.code, False), (d.name,) + tuple(row.names)), "text": inline(row.comment)}) for row in d.rows]
            used = "".join(row.comment for row in d.rows) + d.comment
            rows += [(line - 0.5, {"text": inline(body)}) for line, bodies in chapter.comments.items() if d.line < line < d.end for body in bodies if body not in used]
            made["rows"] = [row for _, row in sorted(rows, key=lambda r: r[0])]
        else:
            function = d.kind == "function"
            made["code"] = code(re.sub(r"\s*\n\s*", " ", d.code[len("TE_API "):]) if function else d.code, (d.name,), "signature" if function else "code")
            for row in d.rows:
                for n in row.names:
                    new(n if d.kind == "enum" else d.name + "." + n)
            if d.rows:  # a list on one line: its anchors stand at its name
                made["names"] = [{"id": anchor, "name": d.name}] + [{"id": n, "name": n} for row in d.rows for n in row.names]
        return made

    def render_chapter(self, name, chapter, taken):
        own, chapter_title = "chapter-" + name, TITLES.get(name, "")
        intro = header.prose(chapter.intro)
        if name == "manual":
            intro = re.sub(r"\A[^\n]*\n\s*=+\n", "", intro)
        intro = re.sub(r"\Aapi/\w+\.h: ", "", intro)
        intro = intro[:1].upper() + intro[1:]
        contents, blocks, title = [], [], chapter_title

        def section(text):
            nonlocal title
            plain = html.unescape(re.sub("<.*?>", "", text))
            title = "%s: %s" % (chapter_title, plain)
            contents.append({"kind": "section", "id": "%s-%s" % (name, slug(plain)), "title": Markup(text)})
            blocks.append(dict(contents[-1]))

        for i, part in enumerate(re.split(r"<h2>(.*?)</h2>", str(render(intro)))):
            if i % 2:
                section(part)
            elif part.strip():
                blocks.append(prose(own, title, len(blocks), Markup(part)))
        for kind, value in chapter.blocks():
            if kind == "section":
                section(html.escape(value, False))
            elif kind == "text":
                blocks.append(prose(own, title, len(blocks), render(value)))
            elif not value.name.startswith("te_") and not value.name.startswith("TE_"):
                blocks.append({"kind": value.kind, "names": [], "text": render(value.comment), "rows": [], "code": code(value.code)})
                for row in value.rows:
                    for n in row.names:
                        taken.add(n)
                        blocks[-1]["names"].append({"id": n, "name": n})
            elif value.comment or value.rows:
                block = self.declaration(chapter, value, taken)
                last = blocks[-1] if blocks else {}
                if last.get("comment") and last.get("comment") == block["comment"] and last["kind"] == block["kind"] and not block["rows"]:  # one comment for a run
                    last["names"] += block["names"]
                    last["code"] += block["code"]
                else:
                    blocks.append(block)
                contents.append({"kind": "name", "id": block["names"][0]["id"], "title": value.name})
        return {"id": own, "title": chapter_title, "contents": contents, "blocks": blocks}

    def render_table(self, path):
        """The chapter of a page of check_table.PAGES, whose title is its first heading."""
        parts = check_table.read_table(path)
        own, title = slug(parts[0][1]), parts[0][1]
        names = check_table.Names([chapter for _, chapter in self.chapters])

        def ours(name):
            """A link to where the name is declared: a field of a group to the group's."""
            call = name.partition("(")[0]
            anchor = links.anchors[names.group_of(name) if "." in name else call]
            return Markup('<a class="name" href="#%s">%s</a>') % (anchor, name)

        contents, blocks, number = [], [], 0
        for kind, value in parts:
            if kind == "heading" and value != title:
                anchor = own + "-" + slug(value)
                contents.append({"kind": "section", "id": anchor, "title": value})
                blocks.append({"kind": "section", "id": anchor, "title": value})
            elif kind == "text":
                blocks.append(prose(own, title, len(blocks), render(value)))
            elif kind == "rows":
                rows = []
                for row in value:
                    number += 1
                    note = ["not there yet: te.h refuses it"] if row.later else []
                    rows.append({"id": "%s-row-%d" % (own, number), "name": row.theirs, "theirs": row.theirs, "ours": Markup(", ").join(ours(name) for name in row.ours) or "left out",
                                 "note": Markup("; ").join(note + ([inline(row.note)] if row.note else []))})
                blocks.append({"kind": "table", "rows": rows})
        return {"id": own, "title": title, "contents": contents, "blocks": blocks}


HTML = "{http://www.w3.org/1999/xhtml}"


def entries(tree):
    """What the search looks through, as page.js does: (name, text, anchor, whole element)."""
    parents = {child: element for element in tree.iter() for child in element}
    for at in tree.iter():
        if "data-name" in at.attrib:
            whole = parents[at] if at.tag == HTML + "h3" else at
            anchor = at.get("id") or next((e.get("id") for e in at.iter() if e.get("id")), "")
            yield at.get("data-name"), " ".join("".join(whole.itertext()).split()), anchor, whole


def unfound(tree):
    """Text of the page's main part that is in no entry of the search; headings and heads of tables aside."""
    found = {e for _, _, _, whole in entries(tree) for e in whole.iter()}
    for main in tree.iter(HTML + "main"):
        for at in main.iter():
            if at not in found and at.tag not in (HTML + "h1", HTML + "h2", HTML + "th") and (at.text or "").strip():
                yield " ".join(at.text.split())[:80]
            yield from (" ".join(child.tail.split())[:80] for child in at if at not in found and (child.tail or "").strip())


def problems(page):
    """The faults of the page: not HTML, an anchor twice, a link without an end, something from outside, a chapter without a title, text that the search does not find."""
    found = []
    parser = html5lib.HTMLParser(strict=False)
    tree = parser.parse(page)
    found += ["line %d: %s %s" % (at[0], what, data) for at, what, data in parser.errors]
    ids, ends = {}, []
    for element in tree.iter():
        for key, value in element.attrib.items():
            if key == "id":
                ids[value] = ids.get(value, 0) + 1
            elif key in ("href", "src") and not value.startswith("#"):
                found.append("%s: the page has to hold all that it needs" % value)
            elif key == "href":
                ends.append(value[1:])
    found += ["anchor %s stands %d times" % each for each in ids.items() if each[1] > 1]
    found += ["a link to #%s, which is not there" % end for end in sorted(set(ends) - set(ids))]
    found += ["%s has no anchor" % name for name, anchor in links.anchors.items() if anchor not in ids]
    found += ["%s: the search finds it, and its anchor is not there" % name for name, _, anchor, _ in entries(tree) if anchor not in ids]
    found += ["the search does not find: %s" % text for text in unfound(tree)]
    titles = [" ".join("".join(e.itertext()).split()) for e in tree.iter(HTML + "h1")]
    found += ["a chapter has %s: TITLES of docs.py gives each one of its own" % ("the title of another, %s" % t if t else "no title") for i, t in enumerate(titles) if not t or t in titles[:i]]
    return found


def colours(style):
    """The rules of a style of Pygments for the words of code; the page itself has the rest."""
    rules = HtmlFormatter(style=style).get_style_defs(".highlight").split("\n")
    return "\n".join(rule for rule in rules if rule.startswith(".highlight .")) + "\n"


def main(out):
    order = re.findall(r'#include "api/(\w+)\.h"', (ROOT / "src/te_parts.h").read_text(encoding="utf-8"))
    chapters = [(name, header.read(ROOT / ("src/api/%s.h" % name))) for name in order]
    base = dict(chapters)["base"]
    version = ".".join(re.search(r"TE_VERSION_%s (\d+)" % part, "\n".join(base.lines)).group(1) for part in ("MAJOR", "MINOR", "PATCH"))
    page = Page(chapters)
    taken = set()
    rendered = [page.render_chapter(name, chapter, taken) for name, chapter in chapters]
    rendered[1:1] = [page.render_table(path) for path in check_table.PAGES]
    css = (HERE / "page.css").read_text(encoding="utf-8")
    css += colours("default") + "@media (prefers-color-scheme: dark) {\n" + colours("github-dark") + "}\n"
    template = Environment(loader=FileSystemLoader(HERE), autoescape=True, keep_trailing_newline=True).get_template("page.html")
    text = template.render(chapters=rendered, version=version, css=Markup(css), js=Markup((HERE / "page.js").read_text(encoding="utf-8")))
    wrong = problems(text)
    for problem in wrong:
        print(problem)
    pathlib.Path(out).write_text(text, encoding="utf-8")
    print("%s: %d chapters, %d names, %d KiB" % (out, len(rendered), len(links.anchors), len(text.encode()) // 1024))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if sys.argv[1:] else __doc__)
