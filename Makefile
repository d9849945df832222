# Freestone: build, run, test, measure. `make help` lists the targets.

.DEFAULT_GOAL := help
.PHONY: help build run test check unit simulate soak mutants python fuzz lab capi clients daemon web install bench clean

FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 3600
SIM = cargo run --locked --quiet -p sim --features mutants --profile sim --
PREFIX ?= /usr/local

help: ## What can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## The release binaries, target/release/freestone, freestoned and libblkio.so
	cargo build --release --locked -p freestone -p daemon -p blkio -p benches -p drivers -p raid-check --lib \
	    --bin freestone --bin freestoned --bin raid-check --bin hot-path --example virtio_blk_check --example nvme_check

run: ## The main job: freestoned with an array, a volume and its page; a guest loses a disk of it. ONCE=1: and ends
	tests/lab/setup
	$(MAKE) build
	tests/lab/demo $(if $(ONCE),--once)

check: ## Fast part: format, lints, structure, prose, dependencies, unit and conformance tests (under 10 minutes)
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	cargo fmt --manifest-path python/Cargo.toml --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	tests/check-structure
	tests/check-dependencies
	tests/check-prose
	$(MAKE) unit
	$(MAKE) simulate

unit:
	cargo test --workspace --locked

simulate: ## About a minute of simulated crashes, and the seeds that once found something
	$(SIM) --regressions crates/sim/regressions.txt --seeds 0..14000 --jobs 2
	$(SIM) --seeds 0..2500 --grow --jobs 2
	$(SIM) --seeds 0..2000 --grow --groups --jobs 2
	$(SIM) --seeds 0..3000 --streams --jobs 2
	$(SIM) --seeds 0..2000 --shapes --jobs 2
	$(SIM) --seeds 0..2000 --faults --jobs 2
	$(SIM) --seeds 0..1000 --faults --grow --groups --jobs 2
	$(SIM) --seeds 0..1000 --faults --shapes --jobs 2
	$(SIM) --seeds 0..1000 --pairs --jobs 2
	$(SIM) --seeds 0..1500 --pools --jobs 2
	$(SIM) --seeds 0..2000 --directed --jobs 2
	$(SIM) --seeds 0..1000 --wide --jobs 2
	$(SIM) --seeds 0..1000 --operations --jobs 2

soak: ## Simulated crashes for SOAK_SECONDS (3600), the same time for each kind of run
	set -- "" "--grow --groups" "--streams" "--grow --groups --streams" "--shapes" "--faults" "--faults --grow --groups --streams" \
	    "--faults --shapes" "--pairs" "--pools" "--directed" "--wide" "--operations"; \
	status=0; \
	for options; do \
	    $(SIM) --seconds $$(($(SOAK_SECONDS) / $$#)) --jobs 2 --keep-going $$options || status=1; \
	done; \
	exit $$status

mutants: ## Every broken variant of the engine must be caught by the simulator
	$(SIM) --mutants --jobs 2

.PHONY: loom miri nightly

loom: ## Models of protocols between threads, in every order of their steps, each with its broken variants
	tests/loom

miri: ## Tests of unsafe code under Miri, where a nightly toolchain has it
	tests/miri

nightly: ## Slow suites: models with more preemptions, Miri where there is one, all mutants, a soak, every power cut
	LOOM_MAX_PREEMPTIONS=5 tests/loom
	tests/miri
	$(MAKE) mutants
	$(MAKE) soak
	tests/lab/setup
	$(MAKE) build
	LAB_CUTS=all LAB_TEST_TIMEOUT_S=28800 tests/lab/run --jobs 2 power_cut

python: ## The Python package: installs it in an environment of its own, runs its tests and examples
	python/run-tests

fuzz: ## Hostile guests, servers, clients, members and files for FUZZ_SECONDS (60), from the fixed corpus
	fuzz/run $(FUZZ_SECONDS)

lab: ## Stock kernels in QEMU against the release binary
	tests/lab/setup
	$(MAKE) build
	tests/lab/run

capi: ## A test for every sentence of the C API, on every driver that this host can serve, with ASan too
	tests/lab/setup
	tests/capi/run

daemon: ## freestoned: its command line, its API against its document, a thousand volumes
	$(MAKE) build
	tests/daemon/run

web: ## The page of freestoned, in Chromium, by mouse and by keyboard alone
	$(MAKE) build
	tests/web/run

install: ## Programs, C library, manual pages, completions, units, user and udev rule under PREFIX (/usr/local), with DESTDIR before it
	cargo build --release --locked -p blkio
	cargo build --release --locked -p freestone -p daemon --bin freestone --bin freestoned
	packaging/install $(PREFIX)

clients: ## QEMU, nbdkit and others of Debian trixie on target/release/libblkio.so
	tests/lab/setup
	tests/clients/setup
	$(MAKE) build
	tests/clients/run

test: ## Everything: installs what is missing, passes all tests
	tests/lab/setup
	tests/clients/setup
	$(MAKE) check
	tests/loom
	$(MAKE) mutants
	tests/capi/run
	$(MAKE) build
	target/release/hot-path --check
	tests/install
	tests/raid-check
	$(MAKE) python
	$(MAKE) fuzz
	tests/clients/run
	tests/daemon/run
	tests/web/run --jobs 2
	tests/lab/demo --once --listen 127.0.0.1:0
	tests/lab/demo --once --listen 127.0.0.1:0 --disk-rate 8M
	tests/lab/run --jobs 2

bench: ## Speed beside qemu-storage-daemon and fio; writes docs/bench/
	tests/lab/setup
	$(MAKE) build
	cargo build --release --locked -p benches
	benches/run

clean: ## Removes what was built and what the lab downloaded
	cargo clean
