# Freestone: build, run, test, measure. `make help` lists the targets.

.DEFAULT_GOAL := help
.PHONY: help build run test check unit fuzz lab clients bench clean

FUZZ_SECONDS ?= 60

help: ## What can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## The release binaries, target/release/freestone and libblkio.so
	cargo build --release --locked -p freestone -p blkio -p benches
	cargo build --release --locked -p drivers --example virtio_blk_check --example nvme_check

run: ## The main job: a Linux guest works on a Freestone disk while its server is killed
	tests/lab/setup
	$(MAKE) build
	tests/lab/demo

check: ## Fast part: format, lints, structure, unit and conformance tests (under 10 minutes)
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	tests/check-structure
	$(MAKE) unit

unit:
	cargo test --workspace --locked

fuzz: ## A hostile guest against rings and protocol for FUZZ_SECONDS (60), from the fixed corpus
	fuzz/run $(FUZZ_SECONDS)

lab: ## Stock kernels in QEMU against the release binary
	tests/lab/setup
	$(MAKE) build
	tests/lab/run

clients: ## QEMU, nbdkit and others of Debian trixie on target/release/libblkio.so
	tests/lab/setup
	tests/clients/setup
	$(MAKE) build
	tests/clients/run

test: ## Everything: installs what is missing, passes all tests
	tests/lab/setup
	$(MAKE) check
	$(MAKE) build
	target/release/hot-path --check
	$(MAKE) fuzz
	tests/clients/run
	tests/lab/run

bench: ## Speed beside qemu-storage-daemon and fio; writes docs/bench/
	tests/lab/setup
	$(MAKE) build
	benches/run

clean: ## Removes what was built and what the lab downloaded
	cargo clean
