"""The preload library: the same hooks without our own libcuda.so.1 on the path, through every way to find a function."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import share as shares
from tests.support.share import LIB, MIB, Share
from vcuda import region
from vcuda.sim import Machine, SimCard

LIMIT = 256 * MIB
PRELOAD = LIB / "preload" / "libvcuda-preload.so"

# Finds the driver's functions in the way that its first argument names; prints what an allocation beyond the limit and one within
# it give, and what cuMemGetInfo says is the total.
PROBE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
typedef void *(*look_t)(void *, const char *);
typedef int (*init_t)(unsigned);
typedef int (*create_t)(void **, unsigned, int);
typedef int (*alloc_t)(unsigned long long *, unsigned long);
typedef int (*info_t)(unsigned long *, unsigned long *);
typedef int (*address_t)(const char *, void **, int, unsigned long, int *);
#ifdef LINKED
int cuInit(unsigned);
int cuCtxCreate_v2(void **, unsigned, int);
int cuMemAlloc_v2(unsigned long long *, unsigned long);
int cuMemGetInfo_v2(unsigned long *, unsigned long *);
#endif
static void *handle;
static address_t address;
static look_t look = dlsym;
static void *versioned(void *from, const char *name) { return dlvsym(from, name, "DRIVER_1.0"); }
static void *by_address(void *from, const char *name)
{
    char plain[64];
    void *found = NULL;
    int status;
    (void)from;
    snprintf(plain, sizeof plain, "%.*s", (int)strcspn(name, "_"), name);
    return address(plain, &found, 11000, 0, &status) ? NULL : found;
}
int main(int count, char **words)
{
    const char *way = words[1], *file = words[2];
    init_t init; create_t create; alloc_t alloc; info_t info;
    if (strcmp(way, "linked") == 0) {
#ifdef LINKED
        init = cuInit; create = cuCtxCreate_v2; alloc = cuMemAlloc_v2; info = cuMemGetInfo_v2;
#else
        return 3;
#endif
    } else {
        int flags = RTLD_NOW | (strcmp(way, "deepbind") == 0 ? RTLD_DEEPBIND : 0) | (strcmp(way, "default") == 0 || strcmp(way, "next") == 0 ? RTLD_GLOBAL : 0);
        if (strcmp(way, "early") == 0 && (dlsym(RTLD_DEFAULT, "cuInit") || !dlerror()))
            return 7;
        handle = strcmp(way, "dlmopen") == 0 ? dlmopen(LM_ID_NEWLM, file, RTLD_NOW) : dlopen(file, flags);
        if (!handle) { fprintf(stderr, "%s\n", dlerror()); return 4; }
        void *from = handle;
        if (strcmp(way, "default") == 0) from = RTLD_DEFAULT;
        if (strcmp(way, "next") == 0) from = RTLD_NEXT;
        if (strcmp(way, "self") == 0) { dlclose(handle); handle = dlopen(file, RTLD_NOW | RTLD_GLOBAL); from = dlopen(NULL, RTLD_NOW); }
        if (strcmp(way, "dlvsym") == 0) look = versioned;
        if (strcmp(way, "libcs") == 0) look = (look_t)dlsym(dlopen("libc.so.6", RTLD_NOW), "dlsym");
        if (strcmp(way, "address") == 0) { address = (address_t)dlsym(handle, "cuGetProcAddress_v2"); look = by_address; }
        init = (init_t)look(from, "cuInit"); create = (create_t)look(from, "cuCtxCreate_v2");
        alloc = (alloc_t)look(from, "cuMemAlloc_v2"); info = (info_t)look(from, "cuMemGetInfo_v2");
        if (!init || !create || !alloc || !info) { fprintf(stderr, "not found: %s\n", dlerror()); return 5; }
        if (strcmp(way, "closed") == 0) dlclose(handle);
        if (look(handle, "cuNoSuchFunction") && strcmp(way, "address") != 0) return 6;
    }
    void *context; unsigned long long pointer; unsigned long left = 0, total = 0;
    if (init(0)) return 8;
    if (create(&context, 0, 0)) return 9;
    int beyond = alloc(&pointer, 300ul << 20), within = alloc(&pointer, 32ul << 20);
    info(&left, &total);
    printf("%d %d %lu\n", beyond, within, total >> 20);
    return 0;
}
"""


def compiled(source: str, output: Path, *flags: str) -> Path:
    file = output.with_suffix(".c")
    file.write_text(source)
    subprocess.run(["gcc", "-w", "-o", str(output), str(file), *flags, "-ldl"], check=True, timeout=60)
    return output


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(PROBE, tmp_path_factory.mktemp("probe") / "probe")


@pytest.fixture(scope="module")
def linked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(PROBE, tmp_path_factory.mktemp("probe") / "linked", "-DLINKED", f"-L{LIB / 'stubs'}", "-lcuda")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine.create(tmp_path / "machine", [SimCard()])


@dataclasses.dataclass(frozen=True)
class Preloaded(Share):
    """A share whose processes get the preload library; the machine's driver stays where it is."""

    before: Sequence[Path] = ()
    after: Sequence[Path] = ()

    @property
    def library(self) -> Path:
        return self.folder / "preload" / PRELOAD.name

    def environment(self, **more: str) -> dict[str, str]:
        assert self.machine
        preload = ":".join(str(path) for path in (*self.before, self.library, *self.after))
        return {**os.environ, **self.machine.environment(), "LD_PRELOAD": preload, **more}


def lay_out(folder: Path, machine: Machine | None, cards: Sequence[region.CardLimit]) -> Preloaded:
    share = Preloaded(folder, machine)
    share.library.parent.mkdir(parents=True)
    shutil.copy(PRELOAD, share.library)
    share.region_directory.mkdir()
    region.create(share.region_directory, cards)
    return share


@pytest.fixture
def share(machine: Machine, tmp_path: Path) -> Preloaded:
    return lay_out(tmp_path / "share", machine, [shares.limit(machine, 0, LIMIT)])


def run(share: Share, program: Path, *words: str, **more: str) -> str:
    result = subprocess.run(
        [program, *words],
        env=share.environment(**more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, shares.beside_refusals(result.stderr)) == (0, ""), result
    return result.stdout


LIMITED = "2 0 256\n"
WAYS = [
    "dlsym", "deepbind", "dlmopen", "default", "next", "self", "libcs", "address", "closed", "early",
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_the_limit_holds_however_the_functions_are_found(
    share: Preloaded, machine: Machine, probe: Path, way: str
) -> None:
    assert run(share, probe, way, "libcuda.so.1") == LIMITED
    # And what the way gives without us: the driver itself.
    bare = subprocess.run(
        [probe, way, "libcuda.so.1"],
        env={**os.environ, **machine.environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert bare.stdout.startswith("0 0 "), bare


def test_the_limit_holds_for_a_program_that_is_linked_with_the_driver(share: Preloaded, linked: Path) -> None:
    assert run(share, linked, "linked") == LIMITED


def test_the_limit_holds_when_the_driver_is_opened_by_its_versioned_path(
    share: Preloaded, machine: Machine, probe: Path
) -> None:
    path = (machine.library_folder / "libcuda.so.1").resolve()
    assert run(share, probe, "dlsym", str(path)) == LIMITED


def test_a_library_that_is_opened_deep_bound_and_needs_the_driver_is_limited(share: Preloaded, tmp_path: Path) -> None:
    library = compiled(
        "int cuInit(unsigned); int cuCtxCreate_v2(void **, unsigned, int);\n"
        "int cuMemAlloc_v2(unsigned long long *, unsigned long);\n"
        "int work(void) { void *c; unsigned long long p; return cuInit(0) || cuCtxCreate_v2(&c, 0, 0) ? -1 "
        ": cuMemAlloc_v2(&p, 300ul << 20); }\n",
        tmp_path / "plugin.so",
        "-shared",
        "-fPIC",
        f"-L{LIB / 'stubs'}",
        "-lcuda",
    )
    code = f"""
    import ctypes
    print(ctypes.CDLL({str(library)!r}, mode=os.RTLD_NOW | os.RTLD_DEEPBIND).work())
    """
    process = subprocess.run(
        ["python3", "-c", "import os\n" + code.replace("\n    ", "\n")],
        env=share.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (process.stdout, shares.beside_refusals(process.stderr)) == ("2\n", "")


def test_unmodified_python_clients_see_the_share(share: Preloaded) -> None:
    found: Any = share.run("""
        from pynvml import *
        begin()
        assert alloc(32 * MIB)[0] == 0
        nvmlInit()
        memory = nvmlDeviceGetMemoryInfo(nvmlDeviceGetHandleByIndex(0))
        from cuda.bindings import driver
        free, total = driver.cuMemGetInfo()[1:]
        processes = nvmlDeviceGetComputeRunningProcesses(nvmlDeviceGetHandleByIndex(0))
        answer([memory.total, memory.used > 0, total, [one.pid for one in processes] == [os.getpid()]])
    """)
    assert found == [LIMIT, True, LIMIT, True]


# An interposer of its own kind: adds its number to getppid() of whoever comes next, twice looked up.
ADDS = """
#define _GNU_SOURCE
#include <dlfcn.h>
int getppid(void)
{
    int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "getppid");
    int (*again)(void) = (int (*)(void))dlvsym(RTLD_NEXT, "getppid", "GLIBC_2.2.5");
    return next ? next() + %d + (again ? 0 : 1000000) : -1;
}
"""
# Overrides dlsym as others do, by the one way that leaves it libc's own.
OTHERS_DLSYM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
static __thread int depth;
void *dlsym(void *handle, const char *name)
{
    static void *(*real)(void *, const char *);
    if (!real)
        real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (++depth > 20)
        __builtin_trap();
    void *found = real(handle, name);
    depth--;
    return found;
}
"""
SUM = """
#include <stdio.h>
#include <unistd.h>
int main(int count, char **words) { printf("%d\\n", getppid()); return 0; }
"""


def test_rtld_next_is_the_next_of_the_caller(share: Preloaded, tmp_path: Path) -> None:
    program = compiled(SUM, tmp_path / "sum")
    adders = [compiled(ADDS % number, tmp_path / f"adds{number}.so", "-shared", "-fPIC") for number in (100000, 200000)]
    plain = os.getpid()
    for before, after in (((), adders), (adders, ()), (adders[:1], adders[1:])):
        arranged = dataclasses.replace(share, before=before, after=after)
        assert int(run(arranged, program)) == plain + 300000


@pytest.mark.parametrize("place", ["before", "after"])
def test_another_preload_that_overrides_dlsym_gets_into_no_loop(
    share: Preloaded, probe: Path, tmp_path: Path, place: str
) -> None:
    other = compiled(OTHERS_DLSYM, tmp_path / "other.so", "-shared", "-fPIC")
    arranged = dataclasses.replace(share, **{place: (other,)})
    for way in ("dlsym", "default", "address", "deepbind"):
        assert run(arranged, probe, way, "libcuda.so.1") == LIMITED


# An interposer that stands between the application and the driver, and a library whose constructor looks things up while it is
# being opened, from several threads.
NESTED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
static int found;
static void *look(void *unused)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (driver && dlsym(driver, "cuMemAlloc_v2") && dlsym(RTLD_DEFAULT, "malloc") && !dlsym(driver, "cuNothing"))
        __atomic_fetch_add(&found, 1, __ATOMIC_RELAXED);
    return NULL;
}
__attribute__((constructor)) static void begin(void) { look(NULL); }
int count(void)
{
    pthread_t threads[8];
    for (int i = 0; i < 8; i++) pthread_create(&threads[i], NULL, look, NULL);
    for (int i = 0; i < 8; i++) pthread_join(threads[i], NULL);
    return found;
}
"""


def test_look_ups_inside_constructors_and_threads(share: Preloaded, tmp_path: Path) -> None:
    library = compiled(NESTED, tmp_path / "nested.so", "-shared", "-fPIC", "-pthread")
    assert share.run(f"answer(C.CDLL({str(library)!r}).count())") == 9


def test_a_process_without_cuda_is_left_alone(share: Preloaded, tmp_path: Path) -> None:
    program = compiled(
        r"""
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        #include <string.h>
        int main(void)
        {
            char line[4096];
            void *itself = dlopen(NULL, RTLD_NOW), *none = dlsym(itself, "noSuchThing");
            printf("%d %s\n", none == NULL, strstr(dlerror(), "noSuchThing") ? "named" : "unnamed");
            for (const char *const *name = (const char *[]){"cuInit", "nvmlInit_v2", "cuMemAlloc_v2", NULL}; *name; name++)
            {
                void *symbol = dlsym(RTLD_DEFAULT, *name);
                printf("%d %d\n", symbol == NULL, dlerror() != NULL);
            }
            printf("%d\n", dlopen("libnothing.so", RTLD_NOW | RTLD_DEEPBIND) == NULL);
            FILE *maps = fopen("/proc/self/maps", "r");
            while (fgets(line, sizeof line, maps))
                if (strstr(line, "libcuda") || strstr(line, "libnvidia") || strstr(line, "/usage") || strstr(line, "/limits"))
                    printf("%s", line);
            return 0;
        }
        """,
        tmp_path / "plain",
    )
    # nvmlInit_v2 is no hook of ours: it is not found, as without us.
    assert run(share, program) == "1 named\n1 1\n1 1\n1 1\n1\n"
    shell = subprocess.run(
        ["/bin/sh", "-c", "echo fine | cat; env true"],
        env=share.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (shell.returncode, shell.stdout, shell.stderr) == (0, "fine\n", "")
