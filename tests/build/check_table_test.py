"""check_table_test.py: forms that tools/check_table.py has to read: rows, names, and tests that exercise them or do not."""
import pathlib
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import check_table
from header import Header

HEADER = """
/* How. TE_HOW_NOT: not. */
typedef enum te_how {
    TE_HOW_NOT = 0,
    TE_HOW_SO = 1 /* so */
} te_how;
/* A group. */
typedef struct te_group_options {
    bool no_bias; /* none */
    te_how how;   /* how */
    int late;     /* not yet: later */
} te_group_options;
/* A desc. */
typedef struct te_thing_desc {
    int64_t size, other; /* sizes */
    te_group_options gemm; /* of the product */
    te_group_options *more; /* not yet: others */
} te_thing_desc;
/* Filled. */
typedef struct te_outputs {
    te_tensor *out; /* it */
} te_outputs;
/* Makes one. */
TE_API te_module *te_thing_create(te_ctx *te, const te_thing_desc *desc, void (*f)(int a, int b), int n[2]);
"""
TESTS = """
#define PREPARE(d) (d)->gemm.how = TE_HOW_SO
static const int table[] = {1, 2};
static void group(te_group_options *g) { g->no_bias = true; }
static void part(te_thing_desc *d) { if (table[0]) d->size = 3; }
TE_TEST(sizes) { te_thing_desc d = {0}; part(&d); te_thing_create(te, &d, NULL, 0); }
TE_TEST_DEVICES(groups) { te_thing_desc d = {.size = 0, .gemm = {.no_bias = false}}; group(&d.gemm); }
TE_TEST(macros) { te_thing_desc d; PREPARE(&d); te_thing_create(te, &d, fn(1, 2), NULL); }
TE_TEST(designated) { te_thing_create(te, &(te_thing_desc){.gemm = {.no_bias = true}, .other = 0, .size = d.other = 7}, NULL, (int[]){1, 2}); }
TE_TEST(sizes_refused) { te_thing_desc d = {.size = -1}; }
TE_TEST(reads) { use(args.outputs.out); /* te_thing_desc d.size = 1 */ }
struct pair { int a; } pairs[] = {{1}};
TE_TEST(nothing) { te_thing_desc d = {.size = 0}; d.gemm.how = TE_HOW_NOT; d.size == 4; te_thing_create(te, &d, NULL, NULL); pairs; }
"""

names = check_table.Names([Header("h", HEADER)])
failed = passed = 0


def expect(what, found, wanted):
    global failed, passed
    passed += found == wanted
    failed += found != wanted
    if found != wanted:
        print("%s: %r, not %r" % (what, found, wanted))


for name, error in [
        ("te_thing_desc", ""), ("te_thing_desc.size", ""), ("te_thing_desc.other", ""), ("te_thing_desc.gemm.no_bias", ""), ("te_thing_create", ""), ("te_thing_create(n)", ""),
        ("te_thing_create(f)", ""), ("TE_HOW_SO", ""), ("te_how", ""), ("te_thing_desc.sizes", "te_thing_desc has no field sizes"),
        ("te_thing_desc.gemm.bias", "te_group_options has no field bias"), ("te_thing_desc.size.x", "te_thing_desc.size.x: what stands before .x is no struct of te.h"),
        ("te_thing_create(m)", "te_thing_create has no parameter m, but te, desc, f, n"), ("te_other", "te.h has no te_other"), ("te_other.x", "te_other is no struct of te.h"),
        ("te_other(x)", "te.h has no function te_other")]:
    expect("the name " + name, names.resolve(name), error)
for name, wanted in [("te_thing_desc.size", False), ("te_thing_desc.gemm.late", True), ("te_thing_desc.more.how", True), ("te_thing_create(n)", False)]:
    expect("not yet: " + name, names.not_yet(name), wanted)

with tempfile.TemporaryDirectory() as folder:
    (pathlib.Path(folder) / "room").mkdir()
    (pathlib.Path(folder) / "room/test_x.c").write_text(TESTS)
    suite = check_table.Suite(pathlib.Path(folder))
    expect("the tests", sorted(suite.tests), ["designated", "groups", "macros", "nothing", "reads", "sizes", "sizes_refused"])
    # Each name, and the tests that exercise it.
    for name, wanted in [
            ("te_thing_desc.size", ["designated", "sizes", "sizes_refused"]), ("te_thing_desc.other", ["designated"]), ("te_thing_desc.gemm.no_bias", ["designated", "groups"]),
            ("te_thing_desc.gemm.how", ["macros"]), ("te_outputs.out", ["reads"]), ("TE_HOW_SO", ["macros"]), ("te_thing_create(n)", ["designated"]),
            ("te_thing_create(f)", ["macros"]), ("te_thing_create", ["designated", "macros", "nothing", "sizes"])]:
        expect(name, sorted(t for t in suite.tests if check_table.exercises(names, suite.text(t), name)), wanted)

    ROWS = [
        ("Thing | te_thing_create | sizes | ", ""), ("size | te_thing_desc.size | sizes | ", ""), ("out | - | | no reason to have it", ""),
        ("late | te_thing_desc.gemm.late | later: is not there yet | ", ""), ("enum | TE_HOW_SO | later: is not there yet | ", ""),
        ("a | - | | ", "is left out without a reason"), ("b | | | ", "the right side is empty; - says that te.h leaves it out"), (" | te_thing_create | sizes | ", "the left side is empty"),
        ("c | te_thing_desc.size | nothing | ", "does not exercise te_thing_desc.size"), ("d | te_thing_desc.size | gone | ", "tests/ has no test gone; --update looks for another"),
        ("e | te_thing_desc.size | | ", "names no test; --update looks for one"), ("f | te_thing_desc.none | sizes | ", "te_thing_desc has no field none"),
        ("g | te_thing_desc.size | later: is not there yet | ", "does not begin with"), ("h | te_thing_desc.gemm.late | sizes | ", "its comment in the header begins"),
        ("i | TE_HOW_SO | later: nobody says this | ", 'no error of src/ says "nobody says this"'), ("j | - | sizes | out", "is left out, and names a test")]
    ROWS += [
        ("k | te_thing_desc.size | sizes_refused | ", "sizes_refused is a test of what te.h refuses"), ("l | te_thing_create(n) | make gate | ", ""),
        ("m | te_thing_create | make other | ", "the Makefile has no make other"), ("n | te_how | make gate | ", "no program of tools/ and examples/ has te_how"),
        ("Thing | te_thing_create | sizes | |\n| Thing(size) | te_thing_desc.size | sizes | ", ""),
        ("Thing | te_thing_create | sizes | |\n| Thing(bias) | te_group_options.no_bias | groups | ", ""),
        ("Thing | te_thing_create | sizes | |\n| Thing.forward(out) | te_outputs.out | reads | ", "reads (room/test_x.c) does not exercise te_outputs.out in a te_thing")]
    evidence = check_table.Evidence(names, suite, "x is not there yet", "gate: x\n", "te_thing_create(te)")
    check_table.ROOT = pathlib.Path(folder)
    page = pathlib.Path(folder) / "t.md"

    def table(text):
        page.write_text(text)
        return check_table.read_table(page)

    for row, wanted in ROWS:
        errors = check_table.check(table("# T\n\n| TransformerEngine | te.h | exercised by | |\n|---|---|---|---|\n| " + row + " |\n"), evidence)[0]
        expect("the row " + row, len(errors) == bool(wanted) and all(wanted in e for e in errors), True)
    expect("a name twice", check_table.check(table("| a | - | | x |\n| a | - | | x |\n"), evidence)[0], ["t.md:2: a: stands in line 1, too"])
    # Heads of tables are no rows, whatever they say; text and headings stay apart.
    expect("parts", [kind for kind, _ in table("# T\n\nText\nmore\n\n| Theirs | te.h | test | |\n|:--|---|---|---|\n| a | - | | x |\n\nEnd\n")], ["heading", "text", "rows", "text"])
    # Updating finds the test, and that one is not there yet; it keeps the row that is right, and the one that nothing exercises.
    page.write_text("| a | te_thing_desc.other | gone | x |\n| b | te_thing_desc.gemm.late | sizes | |\n| c | te_thing_desc.size | sizes | |\n| d | te_how | | |\n| e | TE_HOW_SO | later: is not there yet | |\n")
    expect("updated", len(check_table.update(page, evidence)), 3)
    expect("updating", [row.test for row in check_table.rows_of(check_table.read_table(page))], ["designated", "later: is not there yet", "sizes", "", "macros"])

print("%d passed, %d failed, 0 skipped" % (passed, failed))
sys.exit(failed > 0)
