# make setup   what the demo and the README's commands need, in .venv; make setup-tests adds what the tests need, and
#              make setup-peers timm and transformers, beside the torch that is there
# make demo    images -> shards -> ZeRO pre-training -> accuracy, on data that needs no download
# make test    the checks of every change, JOBS files of tests at a time; make test-all adds the full matrices.
#              TESTS=tests/flops runs these alone
# make test-cluster   runs over two hosts and under a real Slurm, on this machine; root, installs what they need (apt)
# make architecture   the map in docs/architecture.md anew, from the first lines of the modules
# make stable-names   docs/stable_names.txt anew: what docs/stability.md promises, as it is now
# make docs    the pages as a site in build/site, every link and anchor checked
# make sanitize   the C files under gcc's address and undefined-behaviour sanitizers, on COUNT damaged JPEGs
# make fuzz    the same by libFuzzer for MINUTES, from tests/images/corpus on; needs clang. What it finds lies in FUZZ
# make hostile   damaged files of every format to their readers for MINUTES, from SEED on; what fails lies in FOUND
# make chaos   half an hour of random faults, compared to the last bit with the same run left in peace
SHELL := /bin/bash
PYTHON ?= python3
JOBS ?= 2
TESTS ?= tests
BIN := .venv/bin
# conftest.py orders the files: by their number of tests, long ones with few would come last
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder
READY := .venv/.ready
READY_FOR_TESTS := .venv/.ready-for-tests

.PHONY: setup setup-peers setup-tests demo test test-all test-cluster architecture stable-names docs sanitize fuzz hostile chaos lint clean

setup: $(READY)

setup-peers: $(READY)
	@PYTHON="$(PYTHON)" bash cluster/setup.sh .venv --peers

setup-tests: $(READY_FOR_TESTS)

$(READY): pyproject.toml constraints.txt cluster/setup.sh $(wildcard vitscale/ground/native/*.[ch])
	@PYTHON="$(PYTHON)" bash cluster/setup.sh .venv
	@touch $@

$(READY_FOR_TESTS): $(READY)
	@PYTHON="$(PYTHON)" bash cluster/setup.sh .venv --tests
	@touch $@

demo: $(READY)
	@$(BIN)/vitscale demo

lint: $(READY_FOR_TESTS)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: lint
	@$(PYTEST) -m "not slow" $(TESTS)

test-all: lint
	@$(PYTEST) $(TESTS)

test-cluster: $(READY_FOR_TESTS)
	@bash tests/cluster/setup.sh
	@$(BIN)/python -m pytest -m cluster tests/cluster

architecture: $(READY_FOR_TESTS)
	@$(BIN)/python tests/test_architecture.py

stable-names: $(READY_FOR_TESTS)
	@$(BIN)/python -P tests/test_stability.py

docs: $(READY_FOR_TESTS)
	@$(BIN)/python docs/make_site.py

sanitize: $(READY_FOR_TESTS)
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
		gcc -g -O1 -ffp-contract=off -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -Ivitscale/ground/native \
			vitscale/ground/native/*.c tests/images/fuzz_images.c -ljpeg -lm -o $$out/fuzz_images && \
		$(BIN)/python tests/damaged_jpegs.py $$out/jpegs $(or $(COUNT),10000) && \
		find $$out/jpegs -type f -print0 | xargs -0 -n 2000 $$out/fuzz_images

fuzz: FUZZ ?= fuzz
fuzz: LIBJPEG ?= -ljpeg
fuzz:
	@command -v clang >/dev/null || { echo "make fuzz: no clang; sudo apt-get install -y clang" >&2; exit 2; }
	@mkdir -p $(FUZZ)/corpus
	@clang -g -O1 -ffp-contract=off -DLIBFUZZER -fsanitize=fuzzer,address,undefined,float-cast-overflow -fno-sanitize-recover=all \
		-Ivitscale/ground/native vitscale/ground/native/*.c tests/images/fuzz_images.c $(LIBJPEG) -lm -o $(FUZZ)/fuzz_images
	@$(FUZZ)/fuzz_images -max_len=4096 -max_total_time=$$(( $(or $(MINUTES),10) * 60 )) -artifact_prefix=$(FUZZ)/ \
		-print_final_stats=1 $(FUZZ)/corpus tests/images/corpus

hostile: FOUND ?= hostile
hostile: $(READY_FOR_TESTS)
	@$(BIN)/python tests/hostile/mutate.py \
		--minutes $(or $(MINUTES),10) --seed $(or $(SEED),0) --out $(FOUND)

chaos: $(READY_FOR_TESTS)
	@out=$$(mktemp -d) && echo "logs in $$out" && \
		$(BIN)/python tests/faults/chaos.py --minutes $(or $(MINUTES),30) --seed $(or $(SEED),0) --out $$out \
			--objective $(or $(OBJECTIVE),classification)

clean:
	rm -rf .venv build dist *.egg-info
