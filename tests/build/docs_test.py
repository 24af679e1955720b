"""docs_test.py: comments that tools/docs/docs.py has to render, and pages that it must not let pass. Needs its packages: make docs."""
import pathlib
import sys

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
print("%d passed, %d failed, 0 skipped" % (len(COMMENTS) + len(PAGES) - failed, failed))
sys.exit(failed > 0)
