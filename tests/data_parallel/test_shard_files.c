/* test_shard_files.c: ranks with sharded units write a checkpoint together, as a set of files, and it opens in any
 * layout. */
#define _GNU_SOURCE
#include "../lm/folder.h"
#include "lost.h"
#include "shards.h"
#include <dirent.h>
#include <unistd.h>

typedef struct file_case {
    shard_case c;
    te_shard shard;        /* of the ranks that write */
    const char *set, *one; /* what they write; and the same by one rank whose model is whole */
} file_case;

/* Each rank trains a model that is sharded and one that is whole, and they are saved. */
static void write_rank(rank_state *s) {
    const file_case *f = (const file_case *)s->arg;
    te_module *m = make_model(s->te, &f->c), *whole = make_model(s->te, &f->c);
    make_units(s, m, &f->c, f->shard);
    make_units(s, whole, &f->c, TE_SHARD_NONE);
    te_optimizer *opt = make_optimizer(s->te, m, &f->c), *adam = make_optimizer(s->te, whole, &f->c);
    const te_metadata note_of = {"note", "two steps"};
    for (int step = 0; step < 2; step++)
        EXPECT(s,
               run_step(s, m, opt, &f->c, step, NULL) == TE_OK && run_step(s, whole, adam, &f->c, step, NULL) == TE_OK);
    for (int again = 0; again < 2; again++)
        EXPECT(s, te_model_save(s->te, f->set, m, opt, &note_of, 1) == TE_OK); /* the second replaces the first */
    if (s->rank == 0) EXPECT(s, te_model_save(s->te, f->one, whole, adam, &note_of, 1) == TE_OK);
    expect_same(s, m, whole, 0);
    te_optimizer_destroy(opt);
    te_optimizer_destroy(adam);
    te_module_destroy(m);
    te_module_destroy(whole);
}
/* Both checkpoints give the same model and states in every layout, and training goes on alike. */
static void read_rank(rank_state *s) {
    const file_case *f = (const file_case *)s->arg;
    char text[32];
    EXPECT(s, te_barrier(s->group) == TE_OK && te_model_metadata(s->te, f->set, "note", text, sizeof text) == TE_OK &&
                  !strcmp(text, "two steps"));
    for (int shard = TE_SHARD_NONE; shard <= TE_SHARD_PARAMETERS; shard++)
        for (int of_set = 0; of_set < 2; of_set++) {
            te_module *m = make_model(s->te, &f->c), *whole = make_model(s->te, &f->c);
            if (shard == TE_SHARD_NONE && !of_set) {
                te_module_destroy(m);
                te_module_destroy(whole);
                continue;
            }
            make_units(s, m, &f->c, (te_shard)shard);
            make_units(s, whole, &f->c, TE_SHARD_NONE);
            te_optimizer *opt = make_optimizer(s->te, m, &f->c), *adam = make_optimizer(s->te, whole, &f->c);
            te_seed(s->te, 77);
            EXPECT(s, te_model_load(s->te, of_set ? f->set : f->one, m, opt) == TE_OK &&
                          te_model_load(s->te, f->one, whole, adam) == TE_OK);
            EXPECT(s, te_optimizer_steps(opt) == 2 && te_optimizer_steps(adam) == 2);
            expect_same(s, m, whole, 0);
            expect_states(s, opt, m, adam, whole, 0);
            EXPECT(s,
                   run_step(s, m, opt, &f->c, 2, NULL) == TE_OK && run_step(s, whole, adam, &f->c, 2, NULL) == TE_OK);
            expect_same(s, m, whole, 0);
            te_optimizer_destroy(opt);
            te_optimizer_destroy(adam);
            te_module_destroy(m);
            te_module_destroy(whole);
        }
}
/* The files in the folder of a path whose names begin with its name. */
static int files_of(const char *path) {
    char folder[1024];
    const char *name = strrchr(path, '/') + 1;
    int n = 0;
    snprintf(folder, sizeof folder, "%.*s", (int)(name - path), path);
    DIR *dir = opendir(folder);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir)) n += strncmp(e->d_name, name, strlen(name)) == 0;
    closedir(dir);
    return n;
}
TE_TEST(shard_files_open_in_every_layout) {
    static const int some[] = {1, 5, 6, 7, 8, 9}; /* bf16, and weights stored by each recipe */
    for (int i = 0; i < COUNT(some); i += test_every_sanitized(2))
        for (int shard = TE_SHARD_OPTIMIZER; shard <= TE_SHARD_PARAMETERS; shard++) {
            char set[512], one[512];
            if (i > 2 && shard == TE_SHARD_OPTIMIZER) continue;
            snprintf(set, sizeof set, "%s", test_path("set.safetensors"));
            snprintf(one, sizeof one, "%s", test_path("one.safetensors"));
            const file_case f = {{.num = &numbers[some[i]], .width = test_samples() ? 32 : 64, .inner = test_samples() ? 48 : 96}, (te_shard)shard, set, one};
            test_case("%s, shard %d", numbers[some[i]].name, shard);
            run_ranks(3, write_rank, &f);
            CHECK_EQ_INT(files_of(set), 3);
            run_ranks(0, read_rank, &f); /* one rank without a group */
            run_ranks(2, read_rank, &f);
            if (i == 0) run_ranks(4, read_rank, &f);
        }
}
TE_TEST(shard_files_of_other_states) {
    const shard_case cases[] = {{.num = &numbers[1], .width = 13, .inner = 7, .remainders = true},
                                {.num = &numbers[1], .width = 24, .inner = 40, .sgd = true},
                                {.num = &numbers[6], .width = 40, .inner = 50, .frozen = true}};
    for (int i = 0; i < COUNT(cases); i++) {
        char set[512], one[512];
        snprintf(set, sizeof set, "%s", test_path("set.safetensors"));
        snprintf(one, sizeof one, "%s", test_path("one.safetensors"));
        const file_case f = {cases[i], TE_SHARD_PARAMETERS, set, one};
        test_case("case %d", i);
        run_ranks(4, write_rank, &f);
        run_ranks(0, read_rank, &f);
        run_ranks(3, read_rank, &f);
    }
}

/* ---- failures ---- */

typedef struct broken_case {
    const char *path, *of_rank_1;
    te_result expected;
} broken_case;
/* Rank 1 cannot write: every rank fails, names it, and the checkpoint that was there stays. */
static void unwritable_rank(rank_state *s) {
    const broken_case *b = (const broken_case *)s->arg;
    const shard_case c = {.num = &numbers[1], .width = 16, .inner = 24};
    te_module *m = make_model(s->te, &c);
    make_units(s, m, &c, TE_SHARD_PARAMETERS);
    EXPECT(s, te_model_save(s->te, b->path, m, NULL, NULL, 0) == TE_OK);
    te_result result = te_model_save(s->te, s->rank == 1 ? b->of_rank_1 : b->path, m, NULL, NULL, 0);
    EXPECT(s, result != TE_OK && (s->rank == 1 || strstr(te_error(s->te), "rank 1")));
    te_clear_error(s->te);
    EXPECT(s, te_model_load(s->te, b->path, m, NULL) == TE_OK);
    te_module_destroy(m);
}
TE_TEST(shard_files_survive_a_rank_that_cannot_write) {
    char path[512], other[512];
    snprintf(path, sizeof path, "%s", test_path("kept.safetensors"));
    snprintf(other, sizeof other, "%s/no folder/kept.safetensors", test_path("nowhere"));
    const broken_case b = {path, other, TE_ERR_IO};
    run_ranks(3, unwritable_rank, &b);
    CHECK_EQ_INT(files_of(path), 3);
}

static void one_set(rank_state *s) {
    const shard_case c = {.num = &numbers[1], .width = 16, .inner = 24};
    te_module *m = make_model(s->te, &c);
    make_units(s, m, &c, TE_SHARD_OPTIMIZER);
    EXPECT(s, te_model_save(s->te, (const char *)s->arg, m, NULL, NULL, 0) == TE_OK);
    te_module_destroy(m);
}
static void read_any_rank(rank_state *s) {
    const shard_case c = {.num = &numbers[1], .width = 16, .inner = 24};
    te_module *m = make_model(s->te, &c);
    EXPECT(s, te_model_load(s->te, (const char *)s->arg, m, NULL) == TE_OK);
    te_module_destroy(m);
}
/* The others have written when rank 0 cannot: nothing of the save stays. */
static void index_rank(rank_state *s) {
    const shard_case c = {.num = &numbers[1], .width = 16, .inner = 24};
    te_module *m = make_model(s->te, &c);
    make_units(s, m, &c, TE_SHARD_PARAMETERS);
    EXPECT(s, te_model_save(s->te, (const char *)s->arg, m, NULL, NULL, 0) != TE_OK);
    te_clear_error(s->te);
    te_module_destroy(m);
}
TE_TEST(shard_files_go_when_the_index_cannot_be_written) {
    char path[512];
    snprintf(path, sizeof path, "%s", test_path("folder"));
    CHECK_EQ_INT(mkdir(path, 0700), 0); /* no file can take its place */
    run_ranks(3, index_rank, path);
    CHECK_EQ_INT(files_of(path), 1);
    rmdir(path);
}

typedef struct lost_case {
    const char *path;
    int last, *reached;
} lost_case;
static void lost_rank(rank_state *s) {
    const lost_case *c = (const lost_case *)s->arg;
    const shard_case shape = {.num = &numbers[1], .width = 16, .inner = 24};
    lost_group g = {.last = c->last};
    te_module *m = make_model(s->te, &shape);
    te_group *group = lost(s, &g);
    EXPECT(s, te_fsdp_unit(m, &(te_data_parallel_desc){.group = group, .shard = TE_SHARD_PARAMETERS, .no_init_sync = true}) == TE_OK);
    g.counts = true;
    const te_result result = te_model_save(s->te, c->path, m, NULL, NULL, 0);
    if (s->rank == 1) *c->reached = g.barriers >= g.last;
    EXPECT(s, s->rank != 1 || (result != TE_OK) == (g.barriers >= g.last));
    te_clear_error(s->te);
    te_module_destroy(m);
    te_group_destroy(group);
}
/* Rank 1 loses the others at a barrier, and cannot know whether the index has its name already. */
TE_TEST(shard_files_of_ranks_that_lose_each_other) {
    char path[512];
    int reached = 1;
    snprintf(path, sizeof path, "%s", test_path("lost.safetensors"));
    run_ranks(2, one_set, path);
    lost_case c = {.path = path, .reached = &reached};
    for (c.last = 1; reached; c.last++) {
        test_case("barrier %d", c.last);
        run_ranks(2, lost_rank, &c);
        run_ranks(0, read_any_rank, path);
    }
    CHECK_MSG(c.last > 3, "%d barriers", c.last - 2);
    CHECK_EQ_INT(files_of(path), 2);
}

/* Files of a save that was killed, or that had more ranks, go with the next save. */
TE_TEST(shard_files_of_killed_saves_go) {
    char path[512], part[600];
    snprintf(path, sizeof path, "%s", test_path("killed.safetensors"));
    for (int ranks = 2; ranks >= 0; ranks -= 2) {
        snprintf(part, sizeof part, "%s.0123456789abcdef.1-of-4.00000001.7.1.tmp", path);
        leave_temporary(part);
        snprintf(part, sizeof part, "%s.0123456789abcdef.2-of-4", path);
        spit_text(part, "of no index");
        run_ranks(ranks, one_set, path);
        CHECK_EQ_INT(files_of(path), ranks ? 2 : 1);
    }
}

typedef struct memory_case {
    const char *path;
    int64_t request; /* which request of memory of a rank fails; 0: none */
    int rank;
    bool loads;
    int *reached; /* the request was made */
} memory_case;
/* A failed save leaves a checkpoint that opens: the one before, or, if all of it was written, the new one. A failed
 * load fails on all ranks. */
static void memory_rank(rank_state *s) {
    const memory_case *f = (const memory_case *)s->arg;
    const shard_case c = {.num = &numbers[f->loads ? 6 : 1], .width = 16, .inner = 24};
    te_module *m = make_model(s->te, &c);
    make_units(s, m, &c, TE_SHARD_PARAMETERS);
    te_optimizer *opt = make_optimizer(s->te, m, &c);
    const int64_t before = s->requests;
    s->fail_at = s->rank == f->rank && f->request ? before + f->request : 0;
    te_result result = f->loads ? te_model_load(s->te, f->path, m, NULL)
                                : te_model_save(s->te, f->path, m, opt, NULL, 0);
    if (s->fail_at) *f->reached = s->requests >= s->fail_at;
    s->fail_at = 0;
    s->failed = result != TE_OK;
    te_clear_error(s->te);
    EXPECT(s, te_barrier(s->group) == TE_OK && te_model_load(s->te, f->path, m, f->loads ? NULL : opt) == TE_OK);
    te_optimizer_destroy(opt);
    te_module_destroy(m);
}
static void memory_runs_out(memory_case f) {
    int reached = 1, failures = 0;
    f.reached = &reached;
    const int stride = test_every_odd(2);
    run_ranks(2, memory_rank, &f); /* a checkpoint that is there before */
    for (f.request = 1; reached; f.request += stride) {
        test_case("rank %d, %s, request %lld", f.rank, f.loads ? "load" : "save", (long long)f.request);
        rank_state *s = run_ranks(2, memory_rank, &f);
        CHECK(s[f.rank].failed || !s[1 - f.rank].failed);
        failures += s[f.rank].failed;
    }
    CHECK_MSG(failures > 20 / stride, "%d failures", failures);
}
TE_TEST(shard_files_when_memory_runs_out) {
    char set[512], plain[512];
    snprintf(set, sizeof set, "%s", test_path("memory.safetensors"));
    snprintf(plain, sizeof plain, "%s", test_path("plain.safetensors"));
    run_ranks(2, one_set, plain); /* weights in bf16, which are quantized as they are loaded */
    for (int rank = 0; rank < 2; rank++) {
        memory_runs_out((memory_case){.path = set, .rank = rank});
        if (rank) memory_runs_out((memory_case){.path = plain, .rank = rank, .loads = true});
    }
}

typedef struct host_bytes {
    int64_t live, peak;
} host_bytes;
static void *host_alloc(void *user, size_t bytes, size_t alignment) {
    host_bytes *h = (host_bytes *)user;
    h->live += (int64_t)bytes;
    if (h->live > h->peak) h->peak = h->live;
    return test_aligned_alloc(alignment < 64 ? 64 : alignment, bytes);
}
static void host_release(void *user, void *pointer, size_t bytes) {
    ((host_bytes *)user)->live -= (int64_t)bytes;
    test_aligned_free(pointer);
}
static void wide_set(rank_state *s) {
    const shard_case c = {.num = &numbers[1], .width = 256, .inner = 512};
    te_module *m = make_model(s->te, &c);
    make_units(s, m, &c, TE_SHARD_PARAMETERS);
    EXPECT(s, te_model_save(s->te, (const char *)s->arg, m, NULL, NULL, 0) == TE_OK);
    te_module_destroy(m);
}
/* Reading needs memory for one file beside the model, however many files there are. */
TE_TEST(shard_files_are_read_through_one_buffer) {
    const shard_case c = {.num = &numbers[1], .width = 256, .inner = 512};
    host_bytes h = {0};
    char path[512];
    struct stat st;
    snprintf(path, sizeof path, "%s", test_path("wide.safetensors"));
    run_ranks(8, wide_set, path);
    CHECK(stat(path, &st) == 0);
    te_ctx *te = te_ctx_create(&(te_ctx_desc){.device = "cpu", .log = no_log, .cpu_threads = 1, .host_allocator = {.alloc = host_alloc, .release = host_release, .user = &h}});
    te_module *m = make_model(te, &c);
    const int64_t before = h.peak = h.live;
    CHECK(te_model_load(te, path, m, NULL) == TE_OK);
    /* the other files have no more than the index; half of another one: headers, and lists of tensors */
    CHECK_MSG(h.peak - before <= st.st_size * 3 / 2, "%lld bytes for files of %lld", (long long)(h.peak - before), (long long)st.st_size);
    te_module_destroy(m);
    te_ctx_destroy(te);
}

/* Rank 1 cannot read: no rank changes its model. */
static void unreadable_rank(rank_state *s) {
    const broken_case *b = (const broken_case *)s->arg;
    const shard_case c = {.num = &numbers[1], .width = 16, .inner = 24};
    for (int shard = TE_SHARD_OPTIMIZER; shard <= TE_SHARD_PARAMETERS; shard++) {
        te_module *m = make_model(s->te, &c), *same = make_model(s->te, &c);
        te_tensor_fill(te_module_parameter(te_module_child(m, 0), "weight"), 3);
        te_tensor_fill(te_module_parameter(te_module_child(same, 0), "weight"), 3);
        make_units(s, m, &c, (te_shard)shard);
        EXPECT(s, te_model_load(s->te, s->rank == 1 ? b->of_rank_1 : b->path, m, NULL) != TE_OK);
        EXPECT(s, s->rank == 1 || strstr(te_error(s->te), "rank 1"));
        te_clear_error(s->te);
        expect_same(s, m, same, 0);
        te_module_destroy(m);
        te_module_destroy(same);
    }
}
TE_TEST(shard_files_that_a_rank_cannot_read) {
    char path[512], other[512];
    snprintf(path, sizeof path, "%s", test_path("read.safetensors"));
    snprintf(other, sizeof other, "%s", test_path("missing.safetensors"));
    run_ranks(2, one_set, path);
    const broken_case b = {path, other, TE_ERR_IO};
    run_ranks(3, unreadable_rank, &b);
}

static void part_of(const char *path, char *part, size_t size) {
    const char *name = strrchr(path, '/') + 1;
    char folder[1024];
    snprintf(folder, sizeof folder, "%.*s", (int)(name - path), path);
    DIR *dir = opendir(folder);
    for (struct dirent *e = readdir(dir); e; e = readdir(dir))
        if (strncmp(e->d_name, name, strlen(name)) == 0 && strcmp(e->d_name, name) != 0)
            snprintf(part, size, "%s%s", folder, e->d_name);
    closedir(dir);
}
TE_TEST(shard_files_that_are_damaged) {
    te_ctx *te = test_context("cpu");
    const shard_case c = {.num = &numbers[1], .width = 16, .inner = 24};
    char path[512], part[2048] = "", moved[2100];
    snprintf(path, sizeof path, "%s", test_path("damaged.safetensors"));
    run_ranks(2, one_set, path);
    te_scope_begin(te);
    te_module *m = make_model(te, &c);
    CHECK_EQ_INT(te_model_load(te, path, m, NULL), TE_OK);
    part_of(path, part, sizeof part);
    snprintf(moved, sizeof moved, "%s.away", part);
    CHECK_EQ_INT(rename(part, moved), 0);
    CHECK(te_model_load(te, path, m, NULL) != TE_OK);
    CHECK_ERROR(te, TE_ERR_IO, ".1-of-2");
    /* the other rank's file with a slice too few */
    te_tensor *one = te_tensor_full(te, TE_BF16, SHAPE(8), 1);
    te_safetensors_write(te, part, &(te_safetensors_item){"first.bias@16", one}, 1, NULL, 0);
    CHECK(te_model_load(te, path, m, NULL) != TE_OK);
    CHECK_ERROR(te, TE_ERR_FORMAT, "and its slices have 32 bytes");
    te_safetensors_write(te, part, &(te_safetensors_item){"block0.fc1_bias@33", one}, 1, NULL, 0);
    CHECK(te_model_load(te, path, m, NULL) != TE_OK);
    CHECK_ERROR(te, TE_ERR_FORMAT, "begins at byte 33");
    te_safetensors_write(te, part, &(te_safetensors_item){"first.bias", one}, 1, NULL, 0);
    CHECK(te_model_load(te, path, m, NULL) != TE_OK);
    CHECK_ERROR(te, TE_ERR_FORMAT, "is no slice");
    /* an index that names a file elsewhere, or a number that is none */
    te_safetensors_write(te, path, &(te_safetensors_item){"x", one}, 1,
                         (te_metadata[]){{"te.parts", "2"}, {"te.part.1", "../x"}}, 2);
    CHECK(te_model_load(te, path, m, NULL) != TE_OK);
    CHECK_ERROR(te, TE_ERR_FORMAT, "the name of a file in the same folder");
    te_safetensors_write(te, path, &(te_safetensors_item){"x", one}, 1, &(te_metadata){"te.parts", "-3"}, 1);
    CHECK(te_model_load(te, path, m, NULL) != TE_OK);
    CHECK_ERROR(te, TE_ERR_FORMAT, "te.parts");
    te_safetensors_write(te, path, &(te_safetensors_item){"x", one}, 1, &(te_metadata){"te.parts", "1.5"}, 1);
    CHECK(te_model_load(te, path, m, NULL) != TE_OK);
    CHECK_ERROR(te, TE_ERR_FORMAT, "te.parts");
    /* sizes whose product is that of the slices, modulo 2^64, or that are no list of numbers */
    static const char *const sizes[] = {"4294967297,8589934592,2147483648,8", "8,", ",8", "8,,1", "-8", "1e1",
                                        "8,1,1,1,1,1,1,1,1,1", "999999999999999999999"};
    for (int i = 0; i < COUNT(sizes); i++) {
        te_safetensors_write(te, path, &(te_safetensors_item){"first.bias@0", one}, 1,
                             (te_metadata[]){{"te.parts", "1"}, {"te.whole.first.bias", sizes[i]}}, 2);
        CHECK(te_model_load(te, path, m, NULL) != TE_OK);
        CHECK_ERROR(te, TE_ERR_FORMAT, "are not those of a tensor");
    }
    te_module_destroy(m);
    te_scope_end(te);
}
