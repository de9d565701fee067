"""A share changes nothing about code: images of every kind are loaded by every call, their kernels and globals found, settings kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import same
from tests.support import share as shares
from tests.support.share import MIB, Share
from vcuda.sim import Machine, SimCard

# The same kernel (two parameters) and global as PTX, as a cubin, and each in the containers that nvcc makes.
IMAGES = """
import struct
def cubin(name):
    info = b"".join(struct.pack("<BBHIHHI", 4, 0x17, 12, 0, at, offset, bytes_ << 18) for at, offset, bytes_ in ((0, 0, 8), (1, 8, 4)))
    info += struct.pack("<BBH", 3, 0x1b, 255)  # a record whose value is in its head
    names, strings, symbols = [b"", b".shstrtab", b".strtab", b".symtab", b".text." + name, b".nv.info." + name], b"\\0table\\0", b"\\0" * 24
    symbols += struct.pack("<IBBHQQ", 1, 1, 0, 4, 0, 4096)  # an object of 4 KiB
    table = b"\\0".join(names) + b"\\0"
    bodies, kinds, links = [b"", table, strings, symbols, b"\\0" * 64, info], [0, 3, 3, 2, 1, 1], [0, 0, 0, 2, 0, 0]
    data, headers, where = b"", b"", 0
    for body, kind, link, title in zip(bodies, kinds, links, names):
        headers += struct.pack("<IIQQQQIIQQ", where, kind, 0, 0, 64 + len(data), len(body), link, 0, 8, 24 if kind == 2 else 0)
        where += len(title) + 1
        data += body + b"\\0" * (-len(body) % 8)
    return struct.pack("<4sBBB9sHHIQQQIHHHHHH", b"\\x7fELF", 2, 1, 1, b"", 2, 190, 1, 0, 0, 64 + len(data), 0, 64, 0, 0, 64, 6, 1) + data + headers
def fat(kind, payload, packed=0):
    entry = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, len(payload), packed, 0, 0, 8, 80, 0, 0, 0, 0, packed and 9999) + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry)) + entry
kept = []
def wrapped(inner):
    kept.append(C.create_string_buffer(inner, len(inner)))
    return struct.pack("<IIQ", 0x466243B1, 1, C.addressof(kept[-1]))
text = ptx("spin_1us").replace(b".version", b"/* a comment\\n over lines */ .version", 1)
elf = cubin(b"spin_1us")
images = {"ptx": text, "cubin": elf, "fat ptx": fat(1, text), "fat cubin": fat(2, elf), "wrapped": wrapped(fat(2, elf)),
          "packed": fat(2, elf, packed=100)}
"""


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Share:
    folder: Path = tmp_path_factory.mktemp("modules")
    machine = Machine.create(folder / "machine", [SimCard()])
    return shares.simulated(folder / "share", machine, [shares.limit(machine, memory_bytes=256 * MIB)])


@pytest.mark.parametrize("kind", ["ptx", "cubin", "fat ptx", "fat cubin", "wrapped", "packed"])
def test_an_image_is_loaded_by_every_call_and_shows_what_is_in_it(share: Share, kind: str) -> None:
    got = same.answers(
        share,
        IMAGES
        + """
context = begin()
start, image = info(), images[sys.argv[1]]
log, length = C.create_string_buffer(b"old", 16), 16
options, values = (C.c_int * 2)(3, 4), (P * 2)(C.addressof(log), length)
seen = []
for name, more in (("cuModuleLoadData", ()), ("cuModuleLoadDataEx", (2, options, values)), ("cuModuleLoadFatBinary", ())):
    module = made(name, image, *more)
    function = made("cuModuleGetFunction", module, b"spin_1us")
    ok("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, None, (P * 2)(C.addressof(u64()), C.addressof(uint())), None)
    ok("cuCtxSynchronize")
    offset, bytes_, found = size(), size(), []
    while call("cuFuncGetParamInfo", function, size(len(found)), ref(offset), ref(bytes_)) == 0:
        found.append([offset.value, bytes_.value])
    pointer, table = u64(), call("cuModuleGetGlobal_v2", ref(u64()), ref(bytes_), module, b"table")
    size_of_table = bytes_.value if table == 0 else None
    again = 0
    if table == 0:
        ok("cuModuleGetGlobal_v2", ref(pointer), None, module, b"table")
        ok("cuMemsetD8_v2", pointer, C.c_ubyte(5), size(4096))
        again = read(pointer, 4096) == b"\\5" * 4096
    count, functions = uint(), (P * 4)()
    ok("cuModuleGetFunctionCount", ref(count), module)
    ok("cuModuleEnumerateFunctions", functions, 4, module)
    seen.append([found, size_of_table, again, count.value, functions[0] == function.value, call("cuModuleGetFunction", ref(P()), module, b"other")])
    ok("cuModuleUnload", module)
assert seen[0] == seen[1] == seen[2], seen
answer([seen[0], log.value.decode(), values[1], info() == start])
""",
        kind,
    )
    shown, log, written, all_back = got
    if kind == "packed":  # nothing in it can be read: any name is taken for a kernel's
        assert shown[:3] == [[], None, 0] and shown[5] == 0
    else:
        assert shown == [[[0, 8], [8, 4]], 4096, True, 1, True, 500]
    assert (log, written, all_back) == ("", None, True)


def test_images_that_are_none_are_refused_by_every_call(share: Share) -> None:
    got = same.answers(
        share,
        IMAGES
        + """
context = begin()
start = info()
def loaded(name, image):
    return [call(name, ref(P()), image), call(name, None, image), call(name, ref(P()), None)]
broken = [b"no image at all\\0" * 8, fat(2, b"\\x7fELF\\1" + b"\\0" * 100), fat(7, b"x" * 100), b"\\x7fELF\\1" + b"\\0" * 100]
said = [loaded(name, broken[0]) for name in ("cuModuleLoadData", "cuModuleLoadFatBinary")]
said += [call("cuModuleLoadData", ref(P()), image) for image in broken[1:]]
said += [call("cuModuleLoadDataEx", ref(P()), text, 1, None, None), call("cuModuleLoad", ref(P()), None), call("cuModuleLoad", ref(P()), b"/no/such")]
module = made("cuModuleLoadData", text)
wrong = [call("cuModuleGetFunctionCount", None, module), call("cuModuleEnumerateFunctions", None, 1, module),
         call("cuModuleGetGlobal_v2", None, None, module, b"table"), call("cuModuleGetFunction", ref(P()), module, b""),
         call("cuModuleGetLoadingMode", None), call("cuFuncGetModule", None, kernel()), call("cuFuncGetName", None, kernel())]
missing = [call("cuModuleGetGlobal_v2", ref(u64()), None, module, b"nothing"), call("cuModuleUnload", None)]
mode = C.c_int(7)
ok("cuModuleGetLoadingMode", ref(mode))
answer([said, wrong, missing, mode.value])
""",
    )
    assert got == [
        [[200, 1, 1], [200, 1, 1], 200, 200, 200, 1, 1, 301],
        [1] * 7,
        [500, 400],
        2,
    ]


def test_a_library_has_globals_where_a_context_uses_it_and_its_module_goes_with_it(
    share: Share, tmp_path: Path
) -> None:
    got = same.answers(
        share,
        IMAGES
        + """
context = begin()
start = info()
open(sys.argv[1], "wb").write(text[:-1])
seen = []
for name, source in (("cuLibraryLoadData", text), ("cuLibraryLoadFromFile", sys.argv[1].encode())):
    library = made(name, source, None, None, 0, None, None, 0)
    pointer, bytes_ = u64(), size()
    ok("cuLibraryGetGlobal", ref(pointer), ref(bytes_), library, b"table")
    module = made("cuLibraryGetModule", library)
    of_module = made("cuModuleGetGlobal_v2", None, module, b"table", kind=u64)
    seen.append([bytes_.value, pointer.value == of_module.value, call("cuModuleUnload", module),
                 call("cuLibraryGetGlobal", ref(pointer), None, library, b"nothing"), call("cuLibraryGetManaged", ref(pointer), None, library, b"table"),
                 call("cuLibraryGetUnifiedFunction", ref(P()), library, b"spin_1us"), call("cuLibraryGetGlobal", ref(pointer), None, library, None)])
    ok("cuLibraryUnload", library)
    ok("cuCtxSynchronize")
wrong = [call("cuLibraryLoadData", None, text, None, None, 0, None, None, 0), call("cuLibraryLoadData", ref(P()), text, None, None, 0, None, None, 1),
         call("cuLibraryLoadFromFile", ref(P()), None, None, None, 0, None, None, 0)]
handles = [call("cuLibraryUnload", None), call("cuLibraryGetKernel", ref(P()), None, b"x")]
answer([seen, wrong, handles, info() == start])
""",
        str(tmp_path / "image.ptx"),
    )
    assert got == [[[4096, True, 800, 500, 500, 500, 1]] * 2, [1, 1, 1], [400, 400], True]


def test_a_kernels_settings_and_occupancy_are_asked_by_every_name(share: Share) -> None:
    got = same.answers(
        share,
        """
context = begin()
library = made("cuLibraryLoadData", ptx("spin_1us"), None, None, 0, None, None, 0)
both = made("cuLibraryGetKernel", library, b"spin_1us")
function = made("cuKernelGetFunction", both)
number, shared = C.c_int(7), 8
def asked(name, *arguments):
    ok(name, ref(number), *arguments)
    return number.value
ok("cuKernelSetAttribute", shared, 65536, both, 0)
seen = [asked("cuKernelGetAttribute", shared, both, 0), asked("cuFuncGetAttribute", shared, function)]
done = [call("cuFuncSetCacheConfig", function, 1), call("cuKernelSetCacheConfig", both, 1, 0), call("cuFuncSetSharedMemConfig", function, 1),
        call("cuFuncSetSharedSize", function, 100), call("cuParamSetSize", function, 12), call("cuParamSeti", function, 0, 1),
        call("cuParamSetf", function, 0, C.c_float(1)), call("cuParamSetv", function, 0, ref(number), 4)]
grid, block = C.c_int(), C.c_int()
shared_of = C.CFUNCTYPE(size, C.c_int)(lambda threads: threads * 164)  # a block of 1,024 threads alone takes all but 1 KiB
best = []
for limit, given in ((0, None), (100, None), (0, shared_of)):
    ok("cuOccupancyMaxPotentialBlockSize", ref(grid), ref(block), function, given, size(0), limit)
    best.append([grid.value, block.value])
config = (C.c_ubyte * 64)()
clusters = [asked("cuOccupancyMaxPotentialClusterSize", function, config), asked("cuOccupancyMaxActiveClusters", function, config)]
wrong = [call("cuOccupancyMaxPotentialBlockSize", None, None, function, None, size(0), 0), call("cuOccupancyMaxActiveClusters", None, function, config),
         call("cuOccupancyMaxPotentialClusterSize", None, function, config), call("cuFuncGetAttribute", None, shared, function),
         call("cuParamSetv", function, 0, None, 4), call("cuKernelGetFunction", None, both), call("cuFuncIsLoaded", None, function),
         call("cuFuncGetParamInfo", function, size(0), None, None), call("cuOccupancyMaxActiveBlocksPerMultiprocessor", None, function, 32, size(0)),
         call("cuOccupancyAvailableDynamicSMemPerBlock", None, function, 1, 32)]
handles = [call("cuFuncSetCacheConfig", None, 1), call("cuParamSetSize", None, 1), call("cuKernelGetAttribute", ref(number), shared, both, 99)]
answer([seen, done, best, clusters, wrong, handles])
""",
    )
    seen, done, best, clusters, wrong, handles = got
    assert seen == [65536, 65536] and done == [0] * 8
    assert best[0] == [216, 1024] and best[1][1] <= 100
    assert clusters == [8, 108 // 8]
    assert wrong == [1] * 10 and handles == [400, 400, 101]


def test_the_linker_takes_options_and_refuses_what_is_nothing(share: Share) -> None:
    got = same.answers(
        share,
        """
context = begin()
log = C.create_string_buffer(b"old", 16)
state, text = P(), ptx("spin_1us")
ok("cuLinkCreate_v2", 2, (C.c_int * 2)(5, 6), (P * 2)(C.addressof(log), 16), ref(state))
image, length = P(), size()
wrong = [call("cuLinkAddData_v2", state, 1, None, size(5), None, 0, None, None), call("cuLinkAddData_v2", state, 99, text, size(5), None, 0, None, None),
         call("cuLinkAddFile_v2", state, 1, None, 0, None, None), call("cuLinkComplete", state, None, None), call("cuLinkDestroy", None),
         call("cuLinkCreate_v2", 1, None, None, ref(P())), call("cuLinkCreate_v2", 0, None, None, None)]
ok("cuLinkAddData_v2", state, 1, text, size(len(text)), b"one", 0, None, None)
ok("cuLinkComplete", state, ref(image), ref(length))
module = made("cuModuleLoadData", image)
found = call("cuModuleGetFunction", ref(P()), module, b"spin_1us")
ok("cuLinkDestroy", state)
answer([log.value.decode(), wrong, length.value > len(text), found])
""",
    )
    assert got == ["", [1] * 7, True, 0]
