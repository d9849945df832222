# Freestone: build, run, test, measure. `make help` lists the targets.

.DEFAULT_GOAL := help
.PHONY: help build run test check all-suites check-suites unit simulate soak mutants python fuzz lab rbd images capi clients daemon csi fs web install packages dkms formats bench book clean

FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 3600
SIM = cargo run --locked --quiet -p freestone-sim --features mutants --profile sim --
# A workspace of its own, whose program lies beside the others'.
FS = --manifest-path fs/Cargo.toml --target-dir target
PREFIX ?= /usr/local

help: ## What can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## The release binaries, target/release/freestone, freestoned, freestone-csi, freestone-fs and libblkio.so
	cargo build --release --locked -p freestone -p freestone-daemon -p freestone-libblkio -p freestone-benches -p freestone-stack \
	    -p freestone-raid-check --lib --bin freestone --bin freestoned --bin raid-check --bin hot-path --example driver_check
	cargo build --release --locked -p freestone-csi --bin freestone-csi
	@if printf '#include <cap-ng.h>\n#include <seccomp.h>\n' | $(CC) -E - >/dev/null 2>&1; then \
	    echo 'cargo build --release --locked $(FS)'; cargo build --release --locked $(FS); \
	else \
	    echo 'make: freestone-fs is left out: it needs libcap-ng-dev and libseccomp-dev' >&2; \
	fi

run: ## The main job: freestoned with an array, a volume and its page; a guest loses a disk of it. ONCE=1: and ends
	tests/lab/setup
	$(MAKE) build
	tests/lab/demo $(if $(ONCE),--once)

check: ## Fast part: format, lints, structure, prose, links, unit and conformance tests (under 8 minutes)
	@tests/timed --new
	@$(MAKE) --no-print-directory check-suites; status=$$?; tests/timed --table; exit $$status

check-suites:
	$(MAKE) texts
	$(MAKE) --jobs 2 --output-sync=target suite-unit suite-simulate

texts:
	cargo fmt --all --check
	cargo fmt --manifest-path fs/Cargo.toml --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
	cargo fmt --manifest-path python/Cargo.toml --check
	tests/check-structure
	tests/check-prose
	tests/check-links
	tests/check-formats
	benches/run --help > /dev/null

# Most tests wait more than they compute.
unit: export RUST_TEST_THREADS ?= $(shell expr 2 \* $$(nproc))
unit:
	cargo test --workspace --locked --no-fail-fast

simulate: ## About a minute of simulated crashes, and the seeds that once found something
	$(SIM) --regressions crates/sim/regressions.txt --seeds 0..7000 --jobs 2
	$(SIM) --seeds 0..1200 --grow --jobs 2
	$(SIM) --seeds 0..1000 --grow --groups --jobs 2
	$(SIM) --seeds 0..1500 --streams --jobs 2
	$(SIM) --seeds 0..1000 --shapes --jobs 2
	$(SIM) --seeds 0..1000 --faults --jobs 2
	$(SIM) --seeds 0..500 --faults --grow --groups --jobs 2
	$(SIM) --seeds 0..500 --faults --shapes --jobs 2
	$(SIM) --seeds 0..500 --live-faults --faults --jobs 2
	$(SIM) --seeds 0..500 --pairs --jobs 2
	$(SIM) --seeds 0..800 --pools --jobs 2
	$(SIM) --seeds 0..800 --pools --faults --jobs 2
	$(SIM) --seeds 0..800 --pools --faults --moves --jobs 2
	$(SIM) --seeds 0..5000 --tables --jobs 2
	$(SIM) --seeds 0..1500 --images --jobs 2
	$(SIM) --seeds 0..500 --images --faults --jobs 2
	$(SIM) --seeds 0..1000 --directed --jobs 2
	$(SIM) --seeds 0..500 --wide --jobs 2
	$(SIM) --seeds 0..300 --create --jobs 2
	$(SIM) --seeds 0..500 --operations --jobs 2
	$(SIM) --seeds 0..300 --operations --faults --jobs 2
	$(SIM) --seeds 0..300 --operations --offline --jobs 2
	$(SIM) --seeds 0..500 --operations --handover --jobs 2

soak: ## Simulated crashes for SOAK_SECONDS (3600), the same time for each kind of run
	set -- "" "--grow --groups" "--streams" "--grow --groups --streams" "--shapes" "--faults" "--faults --grow --groups --streams" \
	    "--faults --shapes" "--live-faults --faults" "--live-faults --faults --wide --grow" "--pairs" "--pools" "--pools --faults" "--pools --moves" "--pools --faults --moves" "--tables" "--images" "--images --faults" "--directed" "--wide" "--create" "--operations" "--operations --faults" "--operations --offline" "--operations --handover"; \
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

nightly: ## Slow suites: the book, programs built twice, the oldest Rust, AArch64, models with more preemptions, Miri where there is one, all mutants, a soak, many kills, fuzzed images, every power cut, a kernel with KASAN and lockdep, a Ceph cluster
	packaging/book
	tests/reproducible
	DEBIAN_SUITE=bookworm DEBIAN_ROOT_DIR=$(CURDIR)/target/debian-12 tests/packages
	tests/check-msrv --build
	cargo clippy --release --locked $(FS) --all-targets -- -D warnings
	tests/aarch64
	LOOM_MAX_PREEMPTIONS=5 tests/loom
	tests/miri
	$(MAKE) mutants
	$(MAKE) soak
	tests/lab/setup
	$(MAKE) build
	tests/capi/run --every
	tests/lab/demo --once --listen 127.0.0.1:0 --disk-rate 8M
	LAB_PROOFS=all LAB_TEST_TIMEOUT_S=3600 tests/lab/run --nightly --jobs 2
	tests/web/setup
	tests/web/run --nightly
	LAB_KILLS=50 tests/lab/run --jobs 2 kill queues_go_from_core hand_made_rings
	LAB_KILLS=100 LAB_TEST_TIMEOUT_S=3600 tests/lab/run --jobs 2 stock_qemu_is_served_by
	LAB_CUTS=all LAB_TEST_TIMEOUT_S=28800 tests/lab/run --jobs 2 power_cut
	tests/rbd/run --slow
	tests/images/setup
	tests/images/run --slow
	tests/images/run --slow --kill
	tests/images/fuzzer --seeds 50..5000
	tests/check-kernel-style
	kernel=$$(tests/lab/debug-kernel) && LAB_NEW_KERNEL=$$kernel tests/lab/run --jobs 2 hand_made_rings_on_the_newest_kernel

python: ## The Python package: installs it in an environment of its own, runs its tests and examples
	python/run-tests

fuzz: ## Hostile guests, servers, clients, members and files for FUZZ_SECONDS (60), from the fixed corpus
	fuzz/run $(FUZZ_SECONDS)

lab: ## Stock kernels in QEMU against the release binary
	tests/lab/setup
	$(MAKE) build
	tests/lab/run

rbd: ## freestone on images of a Ceph cluster of one node, which is unpacked first (220 MB)
	tests/rbd/setup
	$(MAKE) build
	tests/rbd/run

images: ## QEMU's own tests of qcow2 images, with freestone as the program that reads and writes them
	tests/images/setup
	$(MAKE) build
	tests/images/run --slow --table
	tests/images/fuzzer

capi: ## A test for every sentence of the C API, on every driver that this host can serve, with ASan too
	tests/lab/setup
	tests/capi/run

daemon: ## freestoned: its command line, its API against its document, a thousand volumes
	$(MAKE) build
	tests/daemon/run

csi: ## freestone-csi, the driver for container orchestrators: csi-sanity and cases of its own on a daemon, its chart and image; needs Go
	$(MAKE) build
	tests/csi/run
	tests/csi/image

fs: ## freestone-fs, the virtio-fs server with many queues: its tests, without a guest
	cargo test --release --locked $(FS)

web: ## The page of freestoned, in Chromium, by mouse and by keyboard alone
	$(MAKE) build
	tests/web/run

install: ## Programs, C library, manual pages, completions, units, user and udev rule under PREFIX (/usr/local), with DESTDIR before it
	cargo build --release --locked -p freestone-libblkio
	cargo build --release --locked -p freestone -p freestone-daemon --bin freestone --bin freestoned
	cargo build --release --locked -p freestone-csi --bin freestone-csi
	cargo build --release --locked $(FS)
	packaging/install $(PREFIX)

packages: ## .deb and .rpm of the programs, the C library and their debug information, in target/packages; needs Go
	TARGET_DIR=$$(packaging/programs) && export TARGET_DIR && packaging/packages/build

formats: ## Fixtures of the formats on disk, as this version writes them: for a new release, or a new format before it
	$(MAKE) build
	tests/formats/make

dkms: ## freestone-dkms_VERSION_all.deb, the kernel modules for DKMS, in target/dkms
	packaging/dkms/build

clients: ## QEMU, nbdkit and others of Debian trixie on target/release/libblkio.so
	tests/lab/setup
	tests/clients/setup
	$(MAKE) build
	tests/clients/run

test: ## Everything: installs what is missing, passes all tests
	@tests/timed --new
	@# A run that is ended from outside says what it was doing.
	@trap 'tests/timed --table; kill $$!; exit 143' TERM INT; \
	$(MAKE) --no-print-directory --keep-going all-suites & wait $$!; status=$$?; tests/timed --table; exit $$status

all-suites:
	# Compilers and headers, which all that is built needs.
	tests/timed tools tests/lab/setup --tools
	$(MAKE) texts
	# A failure in one group does not keep the next from running: all failures are seen at once.
	failed=0; \
	$(MAKE) --jobs 3 --output-sync=target suite-setups suite-unit suite-simulate suite-release-build || failed=1; \
	$(MAKE) suite-hot-path || failed=1; \
	$(MAKE) --jobs 2 --output-sync=target paired-suites || failed=1; \
	tests/timed lab tests/lab/run --jobs 3 || failed=1; \
	exit $$failed

# What is compiled or computed comes first, and what waits for a mirror meanwhile.
.PHONY: texts suite-setups suite-clippy suite-unit-build suite-unit suite-simulate suite-release-build suite-hot-path
suite-setups:
	tests/timed lab-setup tests/lab/setup
	tests/timed kernel-modules tests/lab/kernel-modules
	tests/timed clients-setup tests/clients/setup
	tests/timed web-setup tests/web/setup
	tests/timed daemon-setup tests/daemon/setup
	tests/timed csi-setup tests/csi/setup
	tests/timed rbd-setup tests/rbd/setup
	tests/timed images-setup tests/images/setup
suite-clippy: ; tests/timed clippy cargo clippy --workspace --all-targets --locked -- -D warnings
suite-unit-build: | suite-clippy ; tests/timed unit-build cargo test --workspace --locked --no-run
suite-unit: | suite-unit-build ; tests/timed unit $(MAKE) unit
suite-simulate: | suite-unit-build
	tests/timed simulate-build cargo build --locked --quiet -p freestone-sim --features mutants --profile sim
	tests/timed simulate $(MAKE) simulate
suite-release-build: | suite-unit-build ; tests/timed release-build $(MAKE) build
suite-hot-path: ; tests/timed hot-path target/release/hot-path --check

# Most of these wait more than they compute, so two run at a time. The longest come first. More would disturb those
# that compare speeds within a run (daemon).
PAIRED = web capi fuzz rbd images daemon loom csi fs python raid-check mutants clients demo dkms packages dependencies install
.PHONY: paired-suites $(PAIRED:%=suite-%)
paired-suites: $(PAIRED:%=suite-%)
suite-web: ; tests/timed web tests/web/run --jobs 2
suite-capi: ; tests/timed capi tests/capi/run --built
suite-fuzz: ; tests/timed fuzz $(MAKE) fuzz
suite-rbd: ; tests/timed rbd tests/rbd/run
suite-images:
	tests/timed images tests/images/run
	tests/timed image-fuzzer tests/images/fuzzer
suite-daemon: ; tests/timed daemon tests/daemon/run
suite-csi:
	tests/timed csi tests/csi/run
	tests/timed csi-image tests/csi/image
suite-fs: ; tests/timed fs $(MAKE) fs
suite-loom: ; tests/timed loom tests/loom
suite-python: ; tests/timed python $(MAKE) python
suite-raid-check: ; tests/timed raid-check tests/raid-check
suite-mutants: ; tests/timed mutants $(MAKE) mutants
suite-clients: ; tests/timed clients tests/clients/run
suite-demo: ; tests/timed demo tests/lab/demo --once --listen 127.0.0.1:0
suite-dkms: ; tests/timed dkms tests/dkms
suite-dependencies:
	tests/timed dependencies tests/check-dependencies
	tests/timed msrv tests/check-msrv
suite-install: ; tests/timed install tests/install
suite-packages: ; tests/timed packages tests/packages

bench: ## Speed beside qemu-storage-daemon and fio; writes docs/bench/
	tests/lab/setup
	$(MAKE) build
	cargo build --release --locked -p freestone-benches
	benches/run

book: ## The documents as a book, target/book/html; mdbook is compiled below target/tools at first
	packaging/book

clean: ## Removes what was built and what the lab downloaded
	cargo clean
