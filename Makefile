# te.h: `make help` lists what there is. gcc and make are enough for `make run` and `make test`.

ifeq ($(origin CC),default)
CC       := gcc
endif
CFLAGS   ?= -O3 -march=native -g0
# Tests and tools compute little themselves: what they link or include is compiled in a quarter of the time.
TEST_CFLAGS ?= $(patsubst -O3,-O1,$(CFLAGS))
# For what runs here and now, when CC compiles for another machine.
HOST_CC  ?= $(CC)
PYTHON   ?= python3
BUILD    ?= build
# Instrumentation of the variant builds: see `sanitize`.
SANITIZE ?=

# Warnings are errors in CI alone: a compiler that we have not seen shall not stop a newcomer.
WARN     := -Wall -Wextra -Wpedantic -Wfloat-conversion $(if $(CI),-Werror)
LDLIBS   ?= -lm -ldl -pthread
# `make V=1` shows whole commands.
Q         = $(if $(V),,@echo '  $@'; )
COMPILE_AS = $(Q)$(CC) -std=c11 $1 $(WARN) -MMD -MP -Isrc -I. -I$(BUILD) -pthread
COMPILE      = $(call COMPILE_AS,$(CFLAGS) $(SANITIZE))
COMPILE_TEST = $(call COMPILE_AS,$(TEST_CFLAGS) $(SANITIZE))
LINK      = $(Q)$(CC) $(CFLAGS) $(SANITIZE)
# For C files that include the whole te.h: gcc 12 takes 14 s for this warning there. The development build has it, part by part.
WHOLE     = -Wno-misleading-indentation

# Test files that include the implementation, to reach private functions, are compiled as one, with a copy of their own. ONE=1, for the variant builds: all
# tests use that copy, and the implementation is compiled once.
ONE      ?=
TESTS         := $(filter-out tests/build/% $(SKIPPED_TESTS),$(wildcard tests/*/test_*.c))
STAND_INS     := $(if $(filter %test_nccl.c,$(TESTS)),$(BUILD)/nccl_stand_in.so $(BUILD)/nccl_of_gpus.so)
PRIVATE_TESTS := $(if $(TESTS),$(shell grep -l '^\#define TE_IMPLEMENTATION' $(TESTS)))
PUBLIC_TESTS  := $(filter-out $(PRIVATE_TESTS),$(TESTS)) tests/te_test.c
PUBLIC_OBJECTS := $(PUBLIC_TESTS:tests/%.c=$(BUILD)/tests/%.o)
TOOLS         := te_info te_explain te_warm te_bench te_automodel
# Tests that the second run, on the packed te.h, repeats.
PACKED_WORDS  ?= core/ tape/ quant/ modules/ nn/ context_parallel/

ARGS ?=
# Processes that `make test` shares its tests among. Each holds a context of the GPU, so there are sixteen at most.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n < 16 ? n : 16)))

.PHONY: help run moe test pack check-pack tree ptx check-ptx kcheck bench bench-table golden tools matrix docs check-docs sanitize short clean FORCE

help:
	@echo 'make run         trains a small GPT twice, in BF16 and in FP8        (ARGS="--steps 100 file ...")'
	@echo 'make moe         trains a mixture of experts in FP8, as a graph       (ARGS=300: steps)'
	@echo 'make test        runs every test that this machine can run           (ARGS="norm gelu" for some; JOBS=1: in one process)'
	@echo 'make ranks       trains with the examples in 1, 2 and 4 ranks on the CPU; make launchers: under torchrun and mpirun (pip: 0.6 GB)'
	@echo 'make pack        writes te.h and te_kernels.cu.inc from src/'
	@echo 'make check-pack  fails if they are stale'
	@echo 'make tools       te_info, te_explain, te_warm, te_bench, te_automodel, in build/'
	@echo 'make bench       measures against cuBLASLt and the copy bandwidth     (ARGS="gemm norm" for some)'
	@echo 'make bench-table  the table and plot of tests/bench and the README'"'"'s rows, of a CSV that was measured elsewhere'
	@echo 'make kcheck      compiles every kernel for every architecture with NVRTC; needs no GPU'
	@echo 'make ptx         writes src/cuda/baseline.inc, the embedded PTX, with NVRTC 12.0'
	@echo 'make check-ptx   fails if it is not of these kernels'
	@echo 'make docs        the manual, build/docs/te.html: one page to read and search, without a network (pip)'
	@echo 'make check-docs  public declarations without a comment; names of TransformerEngine without ours, or without a test'
	@echo 'make matrix      compiles te.h in every way that users do'
	@echo 'make sanitize    the tests under address, undefined and thread sanitizers; sanitize-address, sanitize-thread: one of the two'
	@echo 'make x86         the CPU tests on 32-bit x86 (gcc-multilib)'
	@echo 'make windows     the CPU tests on Windows (gcc-mingw-w64-x86-64, wine64)'
	@echo 'make short       a short `make run` and `make moe`, and the README'"'"'s program: their losses are checked'
	@echo 'make test-models  examples/llama.c against transformers (pip: 0.6 GB)   (ARGS="llama mixtral" for some)'
	@echo 'make test-onnx   modules as ONNX files, against onnxruntime (pip)     (ARGS="layer .f32" for some)'
	@echo 'make golden      writes tests/golden with numpy and ml_dtypes; only for a change of contract'
	@echo 'make tree        the rooms of src/, their parts and sizes'
	@echo 'make wings       sizes and compile times with each wing left out (an hour)'
	@echo 'make clean       removes build/'

# ---- the product ----------------------------------------------------------------------------------------------------

$(BUILD)/te_pack: tools/te_pack.c
	@mkdir -p $(@D)
	$(Q)$(HOST_CC) -std=c11 -O2 $(WARN) $< -o $@

pack: $(BUILD)/te_pack
	$(BUILD)/te_pack pack

check-pack: $(BUILD)/te_pack
	$(BUILD)/te_pack check
	@find src -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' | sort | xargs awk 'length > 120 { print FILENAME ":" FNR ": " length " columns; 120 are allowed"; bad = 1 } END { exit bad }'

# What each wing costs: rows for the table in src/api/manual.h (ARGS=5: compilations of each, whose median counts).
wings:
	@tools/wings.sh $(ARGS)
.PHONY: wings

tree: $(BUILD)/te_pack
	@$(BUILD)/te_pack tree

# te_pack leaves the file alone when nothing has changed.
$(BUILD)/te_sources.inc: $(BUILD)/te_pack FORCE
	@$(BUILD)/te_pack sources $@

# ---- the development build: src/te_parts.h, so that errors name the part ----------------------------------------------

$(BUILD)/te.o: src/te_parts.h $(BUILD)/te_sources.inc
	$(COMPILE) -DTE_IMPLEMENTATION -x c -c $< -o $@

$(BUILD)/tests/%.o: tests/%.c | $(BUILD)/te_sources.inc
	@mkdir -p $(@D)
	$(COMPILE_TEST) -c $< -o $@

# Written anew when the list has changed.
HASH := \#
PRIVATE_LINES = '$(HASH)define _GNU_SOURCE' '$(HASH)define TE__TUNE' $(if $(ONE),'$(HASH)define TE_IMPLEMENTATION' '$(HASH)include "te_parts.h"') $(PRIVATE_TESTS:%='$(HASH)include "%"')
$(BUILD)/tests/private.c: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' $(PRIVATE_LINES) | cmp -s - $@ || printf '%s\n' $(PRIVATE_LINES) >$@
$(BUILD)/tests/private.o: $(BUILD)/tests/private.c $(BUILD)/te_sources.inc
	$(COMPILE_TEST) -c $< -o $@

$(BUILD)/te_test: $(if $(ONE),,$(BUILD)/te.o) $(BUILD)/tests/private.o $(PUBLIC_OBJECTS) $(STAND_INS)
	$(LINK) $(filter %.o,$^) -o $@ $(LDLIBS)

# Libraries that tests of processes open in the place of NCCL, beside the program; the second one says, as NCCL does, that it takes no host memory.
STAND_IN = $(Q)$(CC) -std=c11 $(TEST_CFLAGS) $(SANITIZE) $(WARN) -Wno-unused-function -MMD -MP -Isrc -pthread -shared -fPIC
$(BUILD)/nccl_stand_in.so: tests/dist/nccl_stand_in.c
	@mkdir -p $(@D)
	$(STAND_IN) $< -o $@
$(BUILD)/nccl_of_gpus.so: tests/dist/nccl_stand_in.c
	@mkdir -p $(@D)
	$(STAND_IN) -DSTAND_IN_OF_GPUS $< -o $@

# The packed te.h, compiled as most users would: the compiler's own dialect, which may fuse multiplications into additions.
$(BUILD)/packed/te.o: te.h
	@mkdir -p $(@D)
	$(Q)$(CC) -O2 -march=native $(WARN) $(WHOLE) -DTE_IMPLEMENTATION -x c -c $< -o $@

$(BUILD)/te_test_packed: $(BUILD)/packed/te.o $(PUBLIC_OBJECTS)
	$(LINK) $^ -o $@ $(LDLIBS)

# train_gpt is there for tests/faults, which interrupts it.
test: $(BUILD)/te_test $(BUILD)/te_test_packed $(BUILD)/train_gpt
	@tests/run.sh $(if $(ARGS),,"$(BUILD)/te_test_packed --jobs $(JOBS) $(PACKED_WORDS)") "$(BUILD)/te_test --jobs $(JOBS) $(ARGS)"

# ---- the examples -----------------------------------------------------------------------------------------------------

# As its users compile it: one file.
$(BUILD)/minimal: examples/minimal.c te.h
	@mkdir -p $(@D)
	$(COMPILE_TEST) $(WHOLE) $< -o $@ $(LDLIBS)

# With the development build's implementation, which tests need as well.
$(BUILD)/moe $(BUILD)/train_gpt $(BUILD)/llama: $(BUILD)/%: examples/%.c $(BUILD)/te.o
	@mkdir -p $(BUILD)/dev && echo '$(HASH)include "te_parts.h"' >$(BUILD)/dev/te.h
	$(call COMPILE_AS,-I$(BUILD)/dev -DTE_IMPLEMENTATION_DONE $(CFLAGS) $(SANITIZE)) $< $(BUILD)/te.o -o $@ $(LDLIBS)

run: $(BUILD)/train_gpt
	$(BUILD)/train_gpt $(ARGS)

moe: $(BUILD)/moe
	$(BUILD)/moe $(ARGS)

short: $(BUILD)/train_gpt $(BUILD)/moe $(BUILD)/minimal
	@tests/run_short.sh $(BUILD)/train_gpt $(BUILD)/moe $(BUILD)/minimal

# The examples in ranks, over the library that stands in for NCCL; and under launchers that pip has, which are not needed otherwise.
ranks: $(BUILD)/train_gpt $(BUILD)/llama $(BUILD)/te_info $(BUILD)/te_bench $(BUILD)/nccl_stand_in.so
	@tests/run_ranks.sh $(BUILD) $(ARGS)

launchers: $(BUILD)/train_gpt $(BUILD)/llama $(BUILD)/te_info $(BUILD)/te_bench $(BUILD)/nccl_stand_in.so $(BUILD)/models/installed
	@tests/dist/launchers.sh $(PYTHON) $(BUILD)
.PHONY: ranks launchers

# ---- tools: a tool without an implementation of its own gets the development build's -----------------------------------

.SECONDEXPANSION:
needs_te = $(shell grep -q 'define TE_IMPLEMENTATION' tools/$1.c 2>/dev/null || echo $(BUILD)/te.o)

$(BUILD)/te_%: tools/te_%.c $$(call needs_te,te_$$*) | $(BUILD)/te_sources.inc
	@mkdir -p $(@D)
	$(COMPILE_TEST) $< $(filter %.o,$^) -o $@ $(LDLIBS)

tools: $(TOOLS:%=$(BUILD)/%) $(BUILD)/minimal

# Without ARGS everything, and tests/bench's table and plot and the README's figures anew. BENCH_CSV: of which GPU; `make bench-table` takes one that was measured elsewhere.
BENCH_CSV ?= tests/bench/h200.csv

bench: $(BUILD)/te_bench
	TE_BENCH_COMMIT="$$(git describe --always --dirty 2>/dev/null)" $(BUILD)/te_bench $(or $(ARGS),--csv $(BENCH_CSV))
	@$(if $(ARGS),,$(PYTHON) tools/bench_table.py $(BENCH_CSV))

bench-table:
	$(PYTHON) tools/bench_table.py $(BENCH_CSV)

# NVRTC from the package index, where the machine has none of its own.
$(BUILD)/nvrtc13:
	$(PYTHON) -m pip install -qq --target $@ nvidia-cuda-nvrtc
$(BUILD)/nvrtc12:
	$(PYTHON) -m pip install -qq --target $@ nvidia-cuda-nvrtc-cu12==12.0.76

find_nvrtc = $$(dirname "$$(find $(BUILD)/$1 -name 'libnvrtc.so*' | sort | head -1)")

kcheck: $(BUILD)/te_kcheck $(if $(TE_NVRTC_PATH),,$(BUILD)/nvrtc13)
	TE_NVRTC_PATH="$(or $(TE_NVRTC_PATH),$(call find_nvrtc,nvrtc13))" $(BUILD)/te_kcheck $(ARGS)

# te_ptx is built with the baseline.inc that it writes or checks.
check-ptx: $(BUILD)/te_ptx
	$(BUILD)/te_ptx --check

ptx: $(BUILD)/te_ptx $(BUILD)/nvrtc12
	TE_NVRTC_PATH="$(call find_nvrtc,nvrtc12)" $(BUILD)/te_ptx src/cuda/baseline.inc

# Bytes that an implementation apart from te.h expects. The files are committed.
$(BUILD)/golden: tools/golden/requirements.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install -qq -r $<
	@touch $@

golden: $(BUILD)/golden
	PYTHONDONTWRITEBYTECODE=1 $</bin/python tools/golden/golden.py tests/golden

# The manual, from the public headers' comments.
$(BUILD)/docs/packages: tools/docs/requirements.txt
	$(PYTHON) -m pip install -qq --upgrade --target $@ -r $<
	@touch $@

docs: $(BUILD)/docs/packages
	@PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$< $(PYTHON) tests/build/docs_test.py
	@PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$< $(PYTHON) tools/docs/docs.py $(BUILD)/docs/te.html

# The example against transformers: small random models of each family, edited configurations, calls that cannot work.
$(BUILD)/models/installed: tools/models/requirements.txt tools/models/install.sh
	tools/models/install.sh $(PYTHON) $(@D)/site
	@touch $@

test-models: $(BUILD)/models/installed $(BUILD)/llama $(BUILD)/nccl_stand_in.so
	TE_DEVICE=$(or $(TE_DEVICE),cpu) PYTHONPATH=$(BUILD)/models/site PYTHONDONTWRITEBYTECODE=1 $(PYTHON) tools/models/models.py $(BUILD)/llama $(BUILD)/models/work $(ARGS)
	$(if $(ARGS),,@for what in train decode batches; do BUILD=$(BUILD) HF_HUB_OFFLINE=1 PYTHONPATH=$(BUILD)/models/site PYTHONDONTWRITEBYTECODE=1 $(PYTHON) tools/beside_torch.py $$what none block --small --device cpu || exit 1; done)
.PHONY: test-models

# Modules as ONNX files: onnx checks each, onnxruntime runs it at sizes that the export did not see.
$(BUILD)/export_onnx: tools/models/export_onnx.c $(BUILD)/te.o
	@mkdir -p $(BUILD)/dev && echo '$(HASH)include "te_parts.h"' >$(BUILD)/dev/te.h
	$(call COMPILE_AS,-I$(BUILD)/dev -DTE_IMPLEMENTATION_DONE $(TEST_CFLAGS) $(SANITIZE)) $< $(BUILD)/te.o -o $@ $(LDLIBS)

$(BUILD)/onnx/site: tools/models/requirements-onnx.txt
	$(PYTHON) -m pip install -qq --upgrade --target $@ -r $<
	@touch $@

test-onnx: $(BUILD)/onnx/site $(BUILD)/export_onnx
	TE_DEVICE=$(or $(TE_DEVICE),cpu) PYTHONPATH=$< PYTHONDONTWRITEBYTECODE=1 $(PYTHON) tools/models/check_onnx.py $(BUILD)/export_onnx $(BUILD)/onnx/work $(ARGS)
.PHONY: test-onnx
# Part of the gate of tests that need packages, but where some of its cases are asked for by name.
test-models: $(if $(ARGS),,test-onnx)

# ---- gates ------------------------------------------------------------------------------------------------------------

# Each tool on the forms that it has to read, then on the public chapters: comments, and the table of TransformerEngine's names.
check-docs: export PYTHONDONTWRITEBYTECODE = 1
check-docs:
	@$(PYTHON) tests/build/check_docs_test.py && $(PYTHON) tools/check_docs.py src/api/*.h
	@$(PYTHON) tests/build/check_table_test.py && $(PYTHON) tools/check_table.py

matrix: $(BUILD)/te_pack
	@tests/build/matrix.sh $(BUILD)/matrix

# Each in a folder of its own; CPU tests only, since the sanitizers do not know the driver. +: make sees that it calls itself, and lends its jobs, only where
# it reads so in the recipe.
SANITIZED = CUDA_VISIBLE_DEVICES= $(MAKE) --no-print-directory ONE=1 CFLAGS='-O1 -g1 -fno-omit-frame-pointer'

sanitize: sanitize-address sanitize-thread
sanitize-address:
	+@$(SANITIZED) BUILD=build/address SANITIZE='-fsanitize=address,undefined -fno-sanitize-recover=all' build/address/te_test
	@tests/run.sh "build/address/te_test $(ARGS)"
sanitize-thread:
	+@$(SANITIZED) BUILD=build/thread SANITIZE='-fsanitize=thread' build/thread/te_test
	@tests/run.sh "build/thread/te_test --jobs $(JOBS) $(ARGS)"
.PHONY: sanitize-address sanitize-thread

# The CPU tests on other machines: 32-bit x86, and Windows by MinGW and wine. -msse2 -mfpmath=sse: without, codes differ (api/manual.h).
x86:
	+@CUDA_VISIBLE_DEVICES= $(MAKE) --no-print-directory ONE=1 BUILD=build/x86 CFLAGS='-O1 -g0 -m32 -msse2 -mfpmath=sse -D_FILE_OFFSET_BITS=64' build/x86/te_test
	@CUDA_VISIBLE_DEVICES= tests/run.sh "build/x86/te_test --jobs $(JOBS) $(ARGS)"

# Its tests of what Windows has not, by file: processes that fork and are killed, libraries made by the machine's C compiler, links, pipes.
NOT_ON_WINDOWS = tests/context_parallel/test_context_processes.c tests/moe/test_expert_processes.c tests/dist/test_starving_process.c tests/data_parallel/test_killed.c tests/data_parallel/test_overlap.c tests/data_parallel/test_shard_processes.c tests/nn/test_parallel_processes.c tests/dist/test_nccl.c tests/dist/test_nccl_paper.c tests/dist/test_store.c tests/cuda/test_jit.c tests/faults/test_machine.c tests/faults/test_train_gpt.c tests/core/test_fork.c tests/sys/test_writers.c
WINE ?= $(or $(shell command -v wine64 || command -v wine || ls /usr/lib/wine/wine64 2>/dev/null),wine)
windows:
	+@$(MAKE) --no-print-directory ONE=1 BUILD=build/windows CC=x86_64-w64-mingw32-gcc HOST_CC='$(HOST_CC)' SKIPPED_TESTS='$(NOT_ON_WINDOWS)' CFLAGS='-O1 -g0' LDLIBS='-static -pthread' \
	    TEST_CFLAGS='-O1 -g0 -D__USE_MINGW_ANSI_STDIO=1 -include tests/build/windows.h' \
	    WARN='-Wall -Wextra -Wno-format $(if $(CI),-Werror)' build/windows/te_test
	@for f in $(NOT_ON_WINDOWS); do echo "skip  $$f: it forks, kills, makes libraries or links"; done
	@echo "skip  32-bit Windows: wine32 is of another architecture's packages; make matrix compiles for it"
	@WINEPREFIX="$(abspath $(BUILD))/wine" WINEDEBUG=-all WINEDLLOVERRIDES='mscoree,mshtml=' tests/run.sh "$(WINE) build/windows/te_test.exe $(ARGS)"
.PHONY: x86 windows

clean:
	rm -rf build

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)
