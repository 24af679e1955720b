"""docs_test.py: comments that tools/docs/docs.py has to render, pages that it must not let pass, and the manual itself: its titles, what its search finds, its width. Needs its packages: make docs.

With chromium on the machine the manual is shown by it, and its own search is asked; else the search's entries are read from the page."""
import html
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools/docs"))
import docs

docs.links.anchors = {"te_a": "te_a", "te_d.x": "te_d.x", "te_d": "te_d"}
COMMENTS = [
    # words, names, characters that HTML and Markdown know
    ("/* One. */", "<p>One.</p>\n"),
    ("/* a < b && *c * d_e_f [x](y) <b>. */", "<p>a &lt; b &amp;&amp; *c * d_e_f [x](y) &lt;b&gt;.</p>\n"),
    ("/* See te_a and te_none. */", '<p>See <a class="name" href="#te_a">te_a</a> and te_none.</p>\n'),
    ("/* te_d.x, te_d.y */", '<p><a class="name" href="#te_d.x">te_d.x</a>, <a class="name" href="#te_d">te_d</a>.y</p>\n'),
    ("/* The `weight`. */", "<p>The <code>weight</code>.</p>\n"),
    # lists, code, pictures, definitions
    ("/* So:\n *   - one\n *     more\n *   - two */", "<p>So:</p>\n<ul>\n<li>one\nmore</li>\n<li>two</li>\n</ul>\n"),
    ("/* So:\n *\n *     x = 1;\n *\n * Then. */", "<p>So:</p>\n<pre><code>x = 1;\n</code></pre>\n<p>Then.</p>\n"),
    ("/* So:\n *   a    first\n *        and on\n *   bcd  second\n * Then. */", "<p>So:</p>\n<dl><dt>a</dt><dd>first and on</dd><dt>bcd</dt><dd>second</dd></dl><p>Then.</p>\n"),
    ("/* So:\n *   abc  first\n *   bcde second c */", "<p>So:</p>\n<dl><dt>abc</dt><dd>first</dd><dt>bcde</dt><dd>second c</dd></dl>"),
    ("/* a: x\n *   y z\n * b */", "<p>a: x\ny z</p>\n<p>b</p>\n"),
    ("/* So:\n *   y = 1;  z = 2\n * b */", "<p>So:</p>\n<pre><code>  y = 1;  z = 2\n</code></pre>\n<p>b</p>\n"),
    ("/* So:\n *\n *   k     a      b\n *   l     c      d */", "<p>So:</p>\n<pre><code>  k     a      b\n  l     c      d\n</code></pre>\n"),
]
PAGE = "<!DOCTYPE html><html lang=\"en\"><head><title>t</title></head><body><p id=\"te_a\">%s</p><p id=\"te_d\"></p><p id=\"te_d.x\"></p></body></html>"
PAGES = [
    ("<a href=\"#te_a\">x</a>", []),
    ("<a href=\"#te_b\">x</a>", ["a link to #te_b, which is not there"]),
    ("<span id=\"te_a\">x</span>", ["anchor te_a stands 2 times"]),
    ("<img src=\"https://a.b/c.png\" alt=\"\">", ["https://a.b/c.png: the page has to hold all that it needs"]),
    ("<b>x", ["line 1: "]),
    ("</p><main>lost<div data-name=\"n\" id=\"n\">found</div></main><p>", ["the search does not find: lost"]),
    ("</p><main><div data-name=\"n\" id=\"n\">found</div>lost<h2>head</h2></main><p>", ["the search does not find: lost"]),
    ("</p><main><article><h3 data-name=\"n\" id=\"n\">n</h3><p>found <b>too</b></p></article></main><p>", []),
    ("</p><div data-name=\"n\">x</div><p>", ["n: the search finds it, and its anchor is not there"]),
    ("</p><h1></h1><p>", ["a chapter has no title"]),
    ("</p><h1>a</h1><h1>a</h1><p>", ["a chapter has the title of another, a"]),
]
failed = 0
for text, expected in COMMENTS:
    if str(docs.render(text)) != expected:
        failed += 1
        print("%r, not %r, of\n%s" % (str(docs.render(text)), expected, text))
for inside, expected in PAGES:
    found = docs.problems(PAGE % inside)
    if len(found) < len(expected) or (found and not expected) or not all(f.startswith(e) for f, e in zip(found, expected)):
        failed += 1
        print("%s, not %s, in %s" % (found, expected, inside))
passed, skipped = len(COMMENTS) + len(PAGES) - failed, 0


def expect(what, fine, found):
    global passed, failed
    passed += bool(fine)
    failed += not fine
    if not fine:
        print("%s: %s" % (what, found))


# ---- the manual ----

# Words of its prose, and a piece of the text that the search shows for them.
QUERIES = [("MinGW", "MSVC, clang or MinGW"), ("fast-math", "refuses -ffast-math"), ("te_linear_create", "te_linear_create"), ("userbuffers memory processes", "userbuffers")]
# For the browser: widths of the page, of what scrolls inside of it and of the window; then what the search shows.
SCRIPT = """<script>window.addEventListener("load", function () {
  var root = document.documentElement, box = document.getElementById("search"), out = { page: root.scrollWidth, room: root.clientWidth, scrolls: [], found: [] };
  document.querySelectorAll("details").forEach(function (d) { d.open = true; });
  document.querySelectorAll("main *, nav").forEach(function (e) {
    var x = getComputedStyle(e).overflowX;
    if ((x === "auto" || x === "scroll") && e.scrollWidth > e.clientWidth) out.scrolls.push(e.textContent.trim().slice(0, 60));
  });
  %s.forEach(function (words) {
    box.value = words;
    box.dispatchEvent(new Event("input"));
    out.found.push(Array.prototype.map.call(document.querySelectorAll("#results a"), function (a) { return [a.textContent, !!document.getElementById(a.hash.slice(1))]; }));
  });
  document.body.textContent = "";
  document.body.append(Object.assign(document.createElement("pre"), { id: "measured", textContent: JSON.stringify(out) }));
});</script></body>"""
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "te.html"
    docs.links.anchors = {}
    expect("the manual is made", docs.main(path) == 0, "see above")
    text = path.read_text(encoding="utf-8")
    tree = docs.html5lib.parse(text)
    titles = ["".join(e.itertext()) for e in tree.iter(docs.HTML + "h1")]
    wrong = [t for t in titles if not re.match(r"te\.h$|[A-Z][^_]+$", t)]
    expect("chapters have titles", len(titles) > 30 and not wrong, wrong)
    entries = list(docs.entries(tree))
    for words, piece in QUERIES:
        found = [name for name, whole, _, _ in entries if all(w.lower() in (name + " " + whole).lower() for w in words.split()) and piece in whole]
        expect("the entries have " + words, found, "none of %d has" % len(entries))
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not browser:
        skipped += 1
        print("skip  the manual in a browser: chromium is not on this machine")
    else:
        path.write_text(text.replace("</body>", SCRIPT % json.dumps([words for words, _ in QUERIES])), encoding="utf-8")
        shown = subprocess.run([browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--user-data-dir=" + folder + "/user", "--window-size=1400,900", "--virtual-time-budget=60000",
                                "--dump-dom", path.as_uri()], capture_output=True, text=True, timeout=300).stdout
        measured = re.search(r'<pre id="measured">(.*?)</pre>', shown, re.S)
        expect("the browser shows the manual", measured, shown[:500])
        if measured:
            got = json.loads(html.unescape(measured.group(1)))
            expect("the page has no scroll bar below", got["page"] <= got["room"] and 1350 < got["room"] <= 1400, "%d pixels of %d" % (got["page"], got["room"]))
            expect("no part of it has one", not got["scrolls"], got["scrolls"])
            for (words, piece), found in zip(QUERIES, got["found"]):
                expect("the search finds " + words, any(piece in shown for shown, _ in found) and all(there for _, there in found), found[:3])

print("%d passed, %d failed, %d skipped" % (passed, failed, skipped))
sys.exit(failed > 0)
