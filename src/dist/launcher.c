/* dist/launcher.c: which rank this process is, and where it meets the others, from the variables that launchers set.
 * This file must not depend on sockets, contexts and groups. */

/* A rank's place among the processes of a job. */
typedef struct te__place {
    const char *by; /* "torchrun" ... */
    int rank, size;
    int local_rank;    /* among the ranks of its host */
    bool one_host;     /* all ranks run on this host */
    char address[256]; /* rank 0's host; empty: unknown */
    int port;          /* of the rendezvous; 0: unknown */
} te__place;

/* The variables of one launcher. NULL: it has none. */
typedef struct te__launcher {
    const char *name;
    const char *rank, *size, *local_rank, *local_size; /* local_size: ranks on this host */
    const char *hosts[2];                              /* the number of hosts */
    const char *agent; /* set by agents that another launcher may have started, one on each host */
} te__launcher;

/* In the order in which they count: Slurm also starts the agents of the others, which inherit its variables. */
static const te__launcher te__launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", {NULL, NULL}, "TORCHELASTIC_RUN_ID"},
    {"Open MPI",
     "OMPI_COMM_WORLD_RANK",
     "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE",
     {NULL, NULL},
     NULL},
    {"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", {NULL, NULL}, NULL},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", NULL, {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}, NULL},
};

enum { TE__SLURM = TE__COUNT(te__launchers) - 1, TE__MAX_RANKS = 1 << 20 };

/* Reads a whole number of an environment variable. Returns TE_OK and `otherwise` if the variable is not set. */
static inline te_result te__place_number(const char *name, int low, int high, int otherwise, int *out, te__text *why) {
    const char *text = name ? te__env(name) : NULL;
    char *end = NULL;
    long value;
    *out = otherwise;
    if (!text) return TE_OK;
    value = strtol(text, &end, 10);
    if (*end || end == text || value < low || value > high) {
        te__text_printf(why, "%s is \"%s\"; a whole number from %d to %d is needed", name, text, low, high);
        return TE_ERR_INVALID;
    }
    *out = (int)value;
    return TE_OK;
}

/* Reads the variables of one launcher. p->size is 0 if it has set none. */
static inline te_result te__place_by(const te__launcher *l, te__place *p, te__text *why) {
    int rank = -1, size = 0, local_size = 0, hosts = 0, i;
    te_result r = te__place_number(l->rank, 0, TE__MAX_RANKS - 1, -1, &rank, why);
    if (r == TE_OK) r = te__place_number(l->size, 1, TE__MAX_RANKS, 0, &size, why);
    if (r == TE_OK) r = te__place_number(l->local_rank, 0, TE__MAX_RANKS - 1, 0, &p->local_rank, why);
    if (r == TE_OK) r = te__place_number(l->local_size, 1, TE__MAX_RANKS, 0, &local_size, why);
    for (i = 0; i < 2 && r == TE_OK && hosts == 0; i++)
        r = te__place_number(l->hosts[i], 1, TE__MAX_RANKS, 0, &hosts, why);
    if (r != TE_OK) return r;
    /* a shell inside an allocation of Slurm has SLURM_NTASKS and no rank */
    if (rank < 0 && (size == 0 || l == &te__launchers[TE__SLURM])) return TE_OK;
    if (rank < 0 || size == 0) {
        te__text_printf(why, "%s is %s and %s is not set; %s sets both", rank < 0 ? l->size : l->rank,
                        te__env(rank < 0 ? l->size : l->rank), rank < 0 ? l->rank : l->size, l->name);
        return TE_ERR_INVALID;
    }
    if (rank >= size) {
        te__text_printf(why, "%s is %d and %s is %d; ranks count from 0 to one less than their number", l->rank, rank,
                        l->size, size);
        return TE_ERR_INVALID;
    }
    if (local_size > size || (local_size && p->local_rank >= local_size)) {
        bool more = local_size > size;
        te__text_printf(why, "%s is %d and %s is %d; %s", l->local_size, local_size, more ? l->size : l->local_rank,
                        more ? size : p->local_rank,
                        more ? "a host cannot have more ranks than there are" : "ranks of a host count from 0");
        return TE_ERR_INVALID;
    }
    p->by = l->name;
    p->rank = rank;
    p->size = size;
    p->one_host = local_size == size || hosts == 1;
    return TE_OK;
}

/* Returns whether launcher b may have started the agents of launcher a, and so have other ranks and another size. */
static inline bool te__launcher_wraps(const te__launcher *b, const te__launcher *a) {
    return (a->agent && te__env(a->agent)) || (b == &te__launchers[TE__SLURM] && !a->agent);
}

/* Writes the first host of a list of Slurm's to `host`: "node[007-9,12],gpu1" gives node007, "r[1-2]n[3,4]-ib" gives
 * r1n3-ib. */
static inline void te__slurm_first_host(const char *list, char *host, size_t cap) {
    size_t n = 0;
    while (*list && *list != ',' && n + 1 < cap) {
        if (*list != '[') {
            host[n++] = *list++;
            continue;
        }
        for (list++; *list && !strchr(",-]", *list) && n + 1 < cap; list++) host[n++] = *list;
        list += strcspn(list, "]");
        list += *list == ']';
    }
    host[n] = 0;
}

/* Finds rank 0's host. */
static inline void te__place_address(te__place *p) {
    static const char *const lists[] = {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"};
    const char *given = te__env("MASTER_ADDR");
    int i;
    if (given) {
        snprintf(p->address, sizeof p->address, "%s", given);
        return;
    }
    if (p->one_host) {
        snprintf(p->address, sizeof p->address, "127.0.0.1");
        return;
    }
    if (strcmp(p->by, te__launchers[TE__SLURM].name) != 0) return;
    for (i = 0; i < TE__COUNT(lists) && !p->address[0]; i++)
        if (te__env(lists[i])) te__slurm_first_host(te__env(lists[i]), p->address, sizeof p->address);
    if (!p->address[0] && te__env("SLURM_LAUNCH_NODE_IPADDR"))
        snprintf(p->address, sizeof p->address, "%s", te__env("SLURM_LAUNCH_NODE_IPADDR"));
}

/* Finds the port: TE_DIST_PORT; or the one after MASTER_PORT, which torchrun's agent listens on itself; or one of
 * 20000 to 29999 by the job's name, so that two jobs of a host rarely meet. */
static inline te_result te__place_port(te__place *p, te__text *why) {
    static const char *const jobs[] = {
        "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid",
        "PMI_JOBID"};
    uint64_t hash = 0;
    int i;
    te_result r = te__place_number("TE_DIST_PORT", 1, 65535, 0, &p->port, why);
    if (r != TE_OK || p->port) return r;
    r = te__place_number("MASTER_PORT", 1, 65534, 0, &p->port, why);
    if (r != TE_OK) return r;
    if (p->port) {
        p->port++;
        return TE_OK;
    }
    for (i = 0; i < TE__COUNT(jobs); i++) {
        const char *job = te__env(jobs[i]);
        if (job) hash = te__hash64(job, strlen(job), hash + 1);
    }
    p->port = 20000 + (int)(hash % 10000);
    return TE_OK;
}

/* Reads this process's place. If no launcher has set anything, *p is the only rank of one, and p->by is NULL. */
static inline te_result te__place_read(te__place *p, te__text *why) {
    const te__launcher *first = NULL;
    te__place other;
    te_result r = TE_OK;
    int i;
    memset(p, 0, sizeof *p);
    p->size = 1;
    p->one_host = true;
    for (i = 0; i < TE__COUNT(te__launchers) && r == TE_OK; i++) {
        const te__launcher *l = &te__launchers[i];
        memset(&other, 0, sizeof other);
        r = te__place_by(l, &other, why);
        if (r != TE_OK || other.size == 0) continue;
        if (!first) {
            *p = other;
            first = l;
        } else if ((other.rank != p->rank || other.size != p->size) && !te__launcher_wraps(l, first)) {
            bool ranks = other.rank != p->rank;
            te__text_printf(why,
                            "two launchers contradict each other: %s is %d (%s) and %s is %d (%s); unset the variables "
                            "of the one that did not start this process",
                            ranks ? first->rank : first->size, ranks ? p->rank : p->size, first->name,
                            ranks ? l->rank : l->size, ranks ? other.rank : other.size, l->name);
            r = TE_ERR_INVALID;
        }
    }
    if (r == TE_OK && p->by) te__place_address(p);
    return r == TE_OK ? te__place_port(p, why) : r;
}
