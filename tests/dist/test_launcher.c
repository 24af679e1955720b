/* tests/dist/test_launcher.c: which rank a process is, by the variables of each launcher, and what it says when they
 * contradict each other. */
#define _GNU_SOURCE
#include "../te_test.h"
#include "base/common.h"
#include "base/hash.c"
#include "base/text.c"
#include "sys/sys.c"
#include "dist/launcher.c"

/* Takes away what started this test, then sets "NAME=value NAME=value ...". */
static void launch(const char *variables) {
    static const char *const names[] = {"RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "LOCAL_WORLD_SIZE",
                                        "TORCHELASTIC_RUN_ID",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "MPI_LOCALRANKID",
                                        "MPI_LOCALNRANKS",
                                        "SLURM_PROCID",
                                        "SLURM_NTASKS",
                                        "SLURM_LOCALID",
                                        "SLURM_STEP_NUM_NODES",
                                        "SLURM_NNODES",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_JOB_NODELIST",
                                        "SLURM_NODELIST",
                                        "SLURM_LAUNCH_NODE_IPADDR",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "PMIX_NAMESPACE",
                                        "OMPI_MCA_ess_base_jobid",
                                        "OMPI_MCA_orte_ess_jobid",
                                        "PMI_JOBID",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "TE_DIST_PORT"};
    char name[64], value[128];
    int n = 0;
    for (int i = 0; i < COUNT(names); i++) test_setenv(names[i], NULL);
    for (; sscanf(variables, " %63[^=]=%127s%n", name, value, &n) == 2; variables += n) test_setenv(name, value);
}

typedef struct launch_case {
    const char *variables;
    int rank, size, local_rank;
    bool one_host;
    const char *by, *address;
    int port; /* 0: any of 20000 to 29999 */
} launch_case;

static const launch_case places[] = {
    {"RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node3 MASTER_PORT=29500 TORCHELASTIC_RUN_ID=none",
     5, 8, 1, false, "torchrun", "node3", 29501},
    {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_PORT=29500", 1, 2, 1, true, "torchrun", "127.0.0.1",
     29501},
    {"RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=29500 TE_DIST_PORT=4000", 0, 1, 0, false, "torchrun",
     "localhost", 4000},
    {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
     "PMIX_NAMESPACE=prterun-a-1@1",
     3, 4, 3, true, "Open MPI", "127.0.0.1", 0},
    {"OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2", 3, 4, 1,
     false, "Open MPI", "", 0},
    {"PMI_RANK=2 PMI_SIZE=3 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=7000", 2, 3, 0, false,
     "MPICH", "10.0.0.1", 7001},
    {"SLURM_PROCID=7 SLURM_NTASKS=16 SLURM_LOCALID=3 SLURM_NNODES=4 SLURM_JOB_NODELIST=gpu[007-9,12],login1 "
     "SLURM_LAUNCH_NODE_IPADDR=10.1.1.1 SLURM_JOB_ID=42",
     7, 16, 3, false, "Slurm", "gpu007", 0},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_JOB_NODELIST=a1,b2 SLURM_STEP_NODELIST=b2,c3", 1, 2, 0, false,
     "Slurm", "b2", 0},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_JOB_NODELIST=r[1-2]n[03,4]-ib,b2", 1, 2, 0, false, "Slurm",
     "r1n03-ib", 0},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_JOB_NODELIST=torn[7", 1, 2, 0, false, "Slurm", "torn7", 0},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=2 SLURM_LAUNCH_NODE_IPADDR=10.1.1.1", 1, 2, 0, false, "Slurm",
     "10.1.1.1", 0},
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=4 SLURM_STEP_NUM_NODES=1", 1, 2, 0, true, "Slurm", "127.0.0.1", 0},
    /* srun starts torchrun's agents, and MPI's */
    {"SLURM_PROCID=1 SLURM_NTASKS=2 RANK=9 WORLD_SIZE=16 TORCHELASTIC_RUN_ID=1 MASTER_ADDR=n0 MASTER_PORT=1000", 9, 16,
     0, false, "torchrun", "n0", 1001},
    {"SLURM_PROCID=0 SLURM_NTASKS=4 OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 MASTER_ADDR=n0", 3, 4, 0, false,
     "Open MPI", "n0", 0},
    /* a shell in an allocation of Slurm */
    {"SLURM_NTASKS=4 SLURM_JOB_ID=42", 0, 1, 0, true, NULL, "", 0},
    /* two launchers that agree */
    {"SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_NNODES=1 RANK=1 WORLD_SIZE=2 MASTER_PORT=5", 1, 2, 0, false, "torchrun", "",
     6},
    {"", 0, 1, 0, true, NULL, "", 0},
};

TE_TEST(places) {
    for (int i = 0; i < COUNT(places); i++) {
        const launch_case *c = &places[i];
        te__text why = TE_ZERO;
        te__place p;
        test_case("%s", c->variables);
        launch(c->variables);
        CHECK_MSG(te__place_read(&p, &why) == TE_OK, "%s", te__text_str(&why));
        CHECK_EQ_INT(p.rank, c->rank);
        CHECK_EQ_INT(p.size, c->size);
        CHECK_EQ_INT(p.local_rank, c->local_rank);
        CHECK_EQ_INT(p.one_host, c->one_host);
        CHECK(c->by ? p.by && !strcmp(p.by, c->by) : !p.by);
        CHECK_MSG(!strcmp(p.address, c->address), "the address is \"%s\"", p.address);
        CHECK_MSG(c->port ? p.port == c->port : p.port >= 20000 && p.port < 30000, "the port is %d", p.port);
        te__text_free(&why);
    }
}

/* Ranks of a job have one port, two jobs of a host have two. */
TE_TEST(ports_by_job) {
    int port[3];
    for (int i = 0; i < 3; i++) {
        te__text why = TE_ZERO;
        te__place p;
        launch(i == 0   ? "PMIX_NAMESPACE=job-1 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2"
               : i == 1 ? "PMIX_NAMESPACE=job-1 OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2"
                        : "PMIX_NAMESPACE=job-2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2");
        CHECK_EQ_INT(te__place_read(&p, &why), TE_OK);
        port[i] = p.port;
    }
    CHECK_EQ_INT(port[0], port[1]);
    CHECK(port[0] != port[2]);
}

static const char *const contradictions[][3] = {
    {"RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2", "RANK is 1", "OMPI_COMM_WORLD_RANK is 0"},
    {"RANK=0 WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=4", "WORLD_SIZE is 2", "PMI_SIZE is 4"},
    {"RANK=0 WORLD_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2", "RANK is 0", "SLURM_PROCID is 1"},
    {"OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMI_RANK=1 PMI_SIZE=2", "OMPI_COMM_WORLD_RANK is 0",
     "PMI_RANK is 1"},
    {"RANK=2 WORLD_SIZE=2", "RANK is 2", "WORLD_SIZE is 2"},
    {"RANK=2", "RANK is 2", "WORLD_SIZE is not set"},
    {"WORLD_SIZE=4", "WORLD_SIZE is 4", "RANK is not set"},
    {"RANK=one WORLD_SIZE=2", "RANK is \"one\"", "whole number"},
    {"RANK=0 WORLD_SIZE=0", "WORLD_SIZE is \"0\"", "from 1"},
    {"RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4", "LOCAL_WORLD_SIZE is 4", "WORLD_SIZE is 2"},
    {"RANK=0 WORLD_SIZE=4 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2", "LOCAL_WORLD_SIZE is 2", "LOCAL_RANK is 2"},
    {"RANK=0 WORLD_SIZE=4 MASTER_PORT=65535", "MASTER_PORT is \"65535\"", "65534"},
    {"RANK=0 WORLD_SIZE=4 TE_DIST_PORT=no", "TE_DIST_PORT is \"no\"", "whole number"},
};

TE_TEST(contradictions) {
    for (int i = 0; i < COUNT(contradictions); i++) {
        te__text why = TE_ZERO;
        te__place p;
        test_case("%s", contradictions[i][0]);
        launch(contradictions[i][0]);
        CHECK_EQ_INT(te__place_read(&p, &why), TE_ERR_INVALID);
        CHECK_STR(te__text_str(&why), contradictions[i][1]);
        CHECK_STR(te__text_str(&why), contradictions[i][2]);
        te__text_free(&why);
    }
}
