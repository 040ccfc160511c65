# A thin front for CMake. `make help` lists what there is.
#
# Variables: BUILD (folder), PREFIX (of make install), OSCAR_LLAMA_DIR (an installed llama.cpp
# instead of our own build), OSCAR_CACHE (where llama.cpp, models and rotations are kept).

BUILD ?= build
PREFIX ?= /usr/local
MODEL ?= smollm2-135m

ASAN_BUILD := $(BUILD)-asan
TSAN_BUILD := $(BUILD)-tsan
CHECK_BUILD := $(BUILD)-check
# The tests compile the CUDA code for one architecture: all four take most of an hour on two cores.
CHECK_CUDA ?= 90a-real
SOAK_SECONDS ?= 1800
JOBS := $(shell nproc 2>/dev/null || echo 2)

.PHONY: all help deps deps-check llama build check check-asan check-tsan soak demo install clean

all: build

help:
	@echo 'make            build everything into $(BUILD)/'
	@echo 'make demo       from a bare machine to a model that answers on the 2-bit cache'
	@echo 'make check      build with warnings as errors and run all tests'
	@echo 'make check-asan the same under AddressSanitizer and UBSan'
	@echo 'make check-tsan the tests of the core under ThreadSanitizer'
	@echo 'make soak       a server under 16 clients for SOAK_SECONDS (1800)'
	@echo 'make deps       install the Debian packages that are missing; CROSS=1: and a cross compiler for a test'
	@echo 'make llama      build llama.cpp into the cache folder (once)'
	@echo 'make install    install to PREFIX (default /usr/local)'
	@echo 'make clean      remove the build folders; the cache folder stays'

deps:
	@scripts/deps.sh

deps-check:
	@scripts/deps.sh --check

llama: deps-check
	@scripts/build-llama.sh

build: deps-check
	@scripts/build.sh $(BUILD) -DOSCAR_CUDA=AUTO

check: deps-check
	@scripts/build.sh $(CHECK_BUILD) -DOSCAR_WERROR=ON -DCMAKE_CUDA_ARCHITECTURES=$(CHECK_CUDA)
	@scripts/check.sh $(CHECK_BUILD) -j $(JOBS)

check-asan: deps-check
	@scripts/build.sh $(ASAN_BUILD) -DOSCAR_WERROR=ON -DOSCAR_SANITIZE=ON -DOSCAR_CUDA=OFF
	@UBSAN_OPTIONS=print_stacktrace=1 scripts/check.sh $(ASAN_BUILD) -j $(JOBS)

check-tsan: deps-check
	@OSCAR_CORE_ONLY=1 scripts/build.sh $(TSAN_BUILD) -DOSCAR_WERROR=ON -DOSCAR_TSAN=ON -DOSCAR_CUDA=OFF
	@TSAN_OPTIONS=halt_on_error=1 scripts/check.sh $(TSAN_BUILD) -j $(JOBS) -R '^test_'

soak: build
	@$(BUILD)/oscar pull $(MODEL) >/dev/null
	@OSCAR_SOAK_SECONDS=$(SOAK_SECONDS) bash tests/check_llama_soak.sh $(BUILD) $(MODEL)

demo: deps
	@scripts/build.sh $(BUILD) -DOSCAR_CUDA=OFF
	@scripts/demo.sh $(BUILD) $(MODEL)

install: build
	@cmake --install $(BUILD) --prefix $(PREFIX)

clean:
	rm -rf $(BUILD) $(CHECK_BUILD) $(ASAN_BUILD) $(TSAN_BUILD)
