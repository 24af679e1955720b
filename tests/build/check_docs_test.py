"""check_docs_test.py: forms that tools/check_docs.py has to read, each with the declarations that it must list."""
import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
from check_docs import lacking
from header import Header

CASES = [
    # comment above, behind, on a later line, none
    ("/* Says it. */\nTE_API int te_a(void);\n", []),
    ("TE_API int te_a(void); /* says it */\n", []),
    ("TE_API int te_a(int x,\n                int y); /* says it */\n", []),
    ("TE_API int te_a(void);\n", ["function te_a"]),
    # of a run, those that its comment names; an empty line ends the run
    ("/* Says it. */\nTE_API int te_a(void);\nTE_API int te_b(void);\n", ["function te_b"]),
    ("/* Says it, and te_b too. */\nTE_API int te_a(void);\nTE_API int te_b(void);\n", []),
    ("/* Says it, and te_b too. */\nTE_API int te_a(void);\n\nTE_API int te_b(void);\n", ["function te_b"]),
    ("/* ---- ruler ---- */\nTE_API int te_a(void);\n", ["function te_a"]),
    # fields: several on a line, arrays, pointers to functions, over several lines
    ("/* S. */\ntypedef struct te_s {\n    int a, b; /* both */\n    int c[4], *d;\n} te_s;\n", ["field c", "field d"]),
    ("/* S: a; b too. */\ntypedef struct te_s {\n    int a;\n    int b, bc;\n} te_s;\n", ["field bc"]),
    ("/* S. */\ntypedef struct te_s {\n    int (*f)(void *user, int x);\n    /* Does it. */\n    int (*g)(void *user,\n             int y);\n} te_s;\n", ["field f"]),
    ("/* S. */\ntypedef struct te_s {\n    /* Says it, and b too. */\n    int a;\n    int b;\n    int c;\n} te_s;\n", ["field c"]),
    ("typedef struct te_s {\n    int a; /* x */\n} te_s;\n", ["struct te_s"]),
    # enumerators, anonymous enums, one-line enums, counts, X-lists
    ("/* E. */\ntypedef enum te_e {\n    TE_A = 0, /* a */\n    TE_B,\n    TE_E_COUNT\n} te_e;\n", ["enumerator TE_B"]),
    ("/* E: TE_A, TE_B. */\ntypedef enum te_e { TE_A, TE_B, TE_C } te_e;\n", ["enumerator TE_C"]),
    ("enum { TE_A, TE_B };\n", ["enum without a name"]),
    ("/* E. */\ntypedef enum te_e {\n    TE_A, /* a */\n#define TE_X(n) TE_##n,\n    TE_LIST(TE_X)\n#undef TE_X\n} te_e;\n", []),
    # macros: branches of one condition, continued lines, private ones
    ("/* TE_M: says it. */\n#ifdef A\n#define TE_M 1\n#else\n#define TE_M 2\n#endif\n", []),
    ("/* Says it. */\n#define TE_M(x) \\\n    X(x)\n#define TE_N 1\n", ["macro TE_N"]),
    ("#define TE_M(x) x\nTE_LIST(TE_M)\n#undef TE_M\n", []),
    # types without a body
    ("typedef struct te_s te_s; /* says it */\ntypedef struct te_t te_t;\ntypedef te_s te_u;\n", ["type te_t", "type te_u"]),
    ("/* Says it. */\ntypedef int (*te_fn)(void);\ntypedef int (*te_gn)(int,\n                     int);\n", ["type te_gn"]),
]

failed = 0
for text, expected in CASES:
    found = [line.split(": ", 1)[1] for line in lacking(Header("h", text))]
    if found != expected:
        failed += 1
        print("check_docs lists %s, not %s, of\n%s" % (found, expected, text))
print("%d passed, %d failed, 0 skipped" % (len(CASES) - failed, failed))
sys.exit(failed > 0)
