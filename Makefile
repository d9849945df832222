# Freestone: build, run, test, measure. `make help` lists the targets.

.DEFAULT_GOAL := help
.PHONY: help build run test check unit simulate soak mutants python fuzz lab capi clients install bench clean

FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 3600
SIM = cargo run --locked --quiet -p sim --features mutants --profile sim --
PREFIX ?= /usr/local

help: ## What can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## The release binaries, target/release/freestone and libblkio.so
	cargo build --release --locked -p freestone -p blkio -p benches -p drivers --lib \
	    --bin freestone --bin hot-path --example virtio_blk_check --example nvme_check

run: ## The main job: a Linux guest works on a Freestone disk while its server is killed
	tests/lab/setup
	$(MAKE) build
	tests/lab/demo

check: ## Fast part: format, lints, structure, unit and conformance tests (under 10 minutes)
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	cargo fmt --manifest-path python/Cargo.toml --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	tests/check-structure
	$(MAKE) unit
	$(MAKE) simulate

unit:
	cargo test --workspace --locked

simulate: ## About a minute of simulated crashes, and the seeds that once found something
	$(SIM) --regressions crates/sim/regressions.txt --seeds 0..16000 --jobs 2
	$(SIM) --seeds 0..3000 --grow --jobs 2
	$(SIM) --seeds 0..2000 --grow --groups --jobs 2
	$(SIM) --seeds 0..3000 --streams --jobs 2
	$(SIM) --seeds 0..2000 --shapes --jobs 2

soak: ## Simulated crashes for SOAK_SECONDS (3600): as they are, with growth, with streams, with both, with changes of shape
	status=0; \
	for options in "" "--grow --groups" "--streams" "--grow --groups --streams" "--shapes"; do \
	    $(SIM) --seconds $$(($(SOAK_SECONDS) / 5)) --jobs 2 --keep-going $$options || status=1; \
	done; \
	exit $$status

mutants: ## Every broken variant of the engine must be caught by the simulator
	$(SIM) --mutants --jobs 2

python: ## The Python package: installs it in an environment of its own, runs its tests and examples
	python/run-tests

fuzz: ## Hostile guests, servers and members for FUZZ_SECONDS (60), from the fixed corpus
	fuzz/run $(FUZZ_SECONDS)

lab: ## Stock kernels in QEMU against the release binary
	tests/lab/setup
	$(MAKE) build
	tests/lab/run

capi: ## A test for every sentence of the C API, on every driver that this host can serve, with ASan too
	tests/lab/setup
	tests/capi/run

install: ## The C library under PREFIX (/usr/local), with DESTDIR before it
	cargo build --release --locked -p blkio
	crates/blkio/install $(PREFIX)

clients: ## QEMU, nbdkit and others of Debian trixie on target/release/libblkio.so
	tests/lab/setup
	tests/clients/setup
	$(MAKE) build
	tests/clients/run

test: ## Everything: installs what is missing, passes all tests
	tests/lab/setup
	tests/clients/setup
	$(MAKE) check
	$(MAKE) mutants
	tests/capi/run
	$(MAKE) build
	target/release/hot-path --check
	$(MAKE) python
	$(MAKE) fuzz
	tests/clients/run
	tests/lab/run --jobs 2

bench: ## Speed beside qemu-storage-daemon and fio; writes docs/bench/
	tests/lab/setup
	$(MAKE) build
	cargo build --release --locked -p benches
	benches/run

clean: ## Removes what was built and what the lab downloaded
	cargo clean
