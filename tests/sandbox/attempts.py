"""Attempts to break out. Each is a program that prints ESCAPED if it succeeded.

`{name}` in a program stands for something of the host's, made by the fixture `world`; `{pids}` for all processes that
it sees in a sandbox, and for one of the tests' own without: those of strangers are left alone. `outside` says whether
the program may be run without a sandbox, to see that it would have succeeded: always, only by root (or where there is
a network, or user namespaces, or a kernel that lets anybody), or never.
"""

from __future__ import annotations

from dataclasses import dataclass

HEAD = """
import ctypes, os, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(what=""):
    print("ESCAPED", what, flush=True)
"""


@dataclass(frozen=True)
class Attempt:
    name: str
    program: str
    outside: str = "always"  # always | root | network | userns | never; maybe: if this kernel allows it
    needs_filters: bool = False  # only Landlock or seccomp prevent it


ATTEMPTS = [
    # -- Reading files of the host
    Attempt("read /etc/shadow", "open('/etc/shadow').read(); escaped()", "root"),
    Attempt("read a file of the user's", "open({secret_file}).read(); escaped()"),
    Attempt("read the project", "open({project} + '/pyproject.toml').read(); escaped()"),
    Attempt("list the home folder", "if set(os.listdir({home})) - {home_needed}: escaped()"),
    Attempt(
        "list the root folder",
        "if set(os.listdir('/')) & {{'run', 'var', 'home', 'sys', 'mnt', 'srv', 'boot'}}: escaped()",
    ),
    Attempt(
        "read through a symbolic link",
        "os.symlink({secret_file}, {scratch} + '/l'); open({scratch} + '/l').read(); escaped()",
    ),
    Attempt(
        "read through a hard link", "os.link({secret_file}, {scratch} + '/h'); open({scratch} + '/h').read(); escaped()"
    ),
    Attempt("read through a shared link", "open({linked}).read(); escaped()"),
    Attempt(
        "walk through /proc/*/root",
        """
for pid in {pids}:
    for door in ('root', 'cwd'):
        try:
            if open(f'/proc/{{pid}}/{{door}}' + {secret_file}).read(): escaped(pid)
        except OSError:
            pass
""",
    ),
    Attempt("climb out with ..", "if open('../' * 40 + {secret_file}).read(): escaped()"),
    Attempt("secrets of the environment", "if 'COVEY_TEST_SECRET' in os.environ: escaped()"),
    Attempt(
        "environment of other processes",
        """
for pid in {pids}:
    try:
        if b'COVEY_TEST_SECRET' in open(f'/proc/{{pid}}/environ', 'rb').read(): escaped(pid)
    except OSError:
        pass
""",
    ),
    Attempt("environment of process 1", "open('/proc/1/environ', 'rb').read(); escaped()", "never"),
    Attempt(
        "memory of another process",
        """
for line in open('/proc/{victim}/maps'):
    if '[stack]' in line:
        low, high = (int(part, 16) for part in line.split()[0].split('-'))
        with open('/proc/{victim}/mem', 'rb') as memory:
            memory.seek(high - 4096)
            if memory.read(4096): escaped()
""",
    ),
    Attempt(
        "memory of process 1",
        """
for line in open('/proc/1/maps'):
    low, high = (int(part, 16) for part in line.split()[0].split('-'))
    with open('/proc/1/mem', 'rb') as memory:
        memory.seek(low)
        if memory.read(16): escaped()
        break
""",
        "never",
    ),
    Attempt(
        "process_vm_readv",
        """
class Span(ctypes.Structure):
    _fields_ = [('base', ctypes.c_void_p), ('size', ctypes.c_size_t)]
maps = [line.split()[0].split('-') for line in open('/proc/{victim}/maps') if '[stack]' in line]
buffer = ctypes.create_string_buffer(16)
mine, theirs = Span(ctypes.addressof(buffer), 16), Span(int(maps[0][1], 16) - 4096, 16)
if libc.process_vm_readv({victim}, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) == 16: escaped()
""",
    ),
    Attempt(
        "ptrace another process",
        """
for pid in {pids}:
    if libc.ptrace(16, pid, None, None) == 0:
        os.waitpid(pid, 0x40000000)
        libc.ptrace(17, pid, None, None)
        escaped(pid)
""",
    ),
    Attempt(
        "files that the host had open",
        """
for name in os.listdir('/proc/self/fd'):
    try:
        if int(name) > 2 and os.path.realpath('/proc/self/fd/' + name) == {secret_file}: escaped(name)
    except OSError:
        pass
""",
    ),
    Attempt(
        "keys of the host's keyring",
        """
number = {{'x86_64': 250, 'aarch64': 219}}[os.uname().machine]
if libc.syscall(number, 10, -3, b'user', b'covey-test-key', 0) > 0: escaped()
""",
    ),
    # -- Writing to the host
    Attempt(
        "write into /usr", "open('/usr/covey-escape', 'w').close(); os.unlink('/usr/covey-escape'); escaped()", "root"
    ),
    Attempt(
        "write into the root folder",
        "open('/covey-escape', 'w').close(); os.unlink('/covey-escape'); escaped()",
        "root",
    ),
    Attempt("write into the project", "p = {project} + '/covey-escape'; open(p, 'w').close(); os.unlink(p); escaped()"),
    Attempt(
        "make and fill the project",
        """
os.makedirs({project}, exist_ok=True)
p = {project} + '/covey-escape'; open(p, 'w').close(); os.unlink(p)
if os.path.exists({project} + '/pyproject.toml'):  # a folder of that name in a /tmp of its own is no escape
    escaped()
""",
    ),
    Attempt("change a file of the user's", "open({secret_file}, 'a').close(); escaped()"),
    Attempt("change the interpreter", "p = os.__file__; m = os.stat(p).st_mode; os.chmod(p, m); escaped()"),
    Attempt(
        "write a kernel setting",
        """
p = '/proc/sys/vm/swappiness'; old = open(p).read(); open(p, 'w').write(old); escaped()
""",
        "root",
    ),
    # -- The network
    Attempt("a service on the loopback", "socket.create_connection(('127.0.0.1', {port}), 3); escaped()"),
    Attempt(
        "a service on the loopback, IPv6 spelling",
        "socket.create_connection(('::ffff:127.0.0.1', {port}), 3); escaped()",
    ),
    Attempt(
        "the internet",
        """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('192.0.2.1', 53)); escaped()
""",
        "network",
    ),
    Attempt(
        "the cloud's metadata service",
        """
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect(('169.254.169.254', 80)); escaped()
""",
        "network",
    ),
    Attempt("network devices", "if [n for _, n in socket.if_nameindex() if n != 'lo']: escaped()", "network"),
    Attempt("an abstract socket", "s = socket.socket(socket.AF_UNIX); s.connect({abstract}); escaped()"),
    Attempt("a socket in a folder", "s = socket.socket(socket.AF_UNIX); s.connect({socket_file}); escaped()"),
    # -- Privileges
    Attempt(
        "namespaces of the host",
        """
same = [n for n in ('mnt', 'pid', 'net', 'ipc', 'uts', 'user') if os.readlink('/proc/self/ns/' + n) == {namespaces}[n]]
if same: escaped(same)
""",
    ),
    Attempt(
        "capabilities",
        """
caps = [line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')]
if any(int(cap, 16) for cap in caps): escaped(caps)
""",
        "root",
    ),
    Attempt("new privileges", "if 'NoNewPrivs:\\t0' in open('/proc/self/status').read(): escaped()"),
    Attempt("become root", "os.setuid(0); escaped()", "root"),
    Attempt("become another user", "os.setuid(12345); escaped()", "root"),
    Attempt(
        "setuid programs",
        """
import re, subprocess
mounts = open('/proc/self/mountinfo').read().splitlines()
if [m for m in mounts if m.split()[4] in ('/', '/usr', '/tmp') and 'nosuid' not in m.split()[5]]: escaped()
""",
    ),
    Attempt(
        "mount",
        """
place = os.fsencode({scratch} + '/m')
os.makedirs(place)
if libc.mount(b'none', place, b'tmpfs', 0, None) == 0: libc.umount2(place, 2); escaped()
""",
        "root",
    ),
    Attempt(
        "make a mount writable",
        """
for place in (b'/', b'/usr'):
    if libc.mount(None, place, None, 32 | 4096, None) == 0: escaped()
""",
        "never",
    ),
    Attempt(
        "uncover what is mounted over",
        """
for place in ('/', '/usr', '/tmp', '/proc', '/dev'):
    if libc.umount2(place.encode(), 2) == 0: escaped(place)
""",
        "never",
    ),
    Attempt("a user namespace in the sandbox", "if libc.unshare(0x10000000) == 0: escaped()", "userns"),
    Attempt(
        "a cloned user namespace",
        """
number = {{'x86_64': 56, 'aarch64': 220}}[os.uname().machine]
child = libc.syscall(number, 0x10000000 | 17, 0, 0, 0, 0)
if child == 0: os._exit(0)
if child > 0: os.waitpid(child, 0); escaped()
""",
        "userns",
    ),
    Attempt(
        "enter other namespaces",
        """
for pid in {pids}:
    for n in ('mnt', 'net', 'pid'):
        try:
            f = os.open(f'/proc/{{pid}}/ns/{{n}}', os.O_RDONLY)
        except OSError:
            continue
        if libc.setns(f, 0) == 0: escaped(n)
""",
        "root",
    ),
    Attempt("chroot", "os.makedirs({scratch} + '/c'); os.chroot({scratch} + '/c'); escaped()", "root"),
    Attempt(
        "kernel devices",
        """
for device in ('/dev/mem', '/dev/kmem', '/dev/kmsg', '/dev/port', '/dev/sda', '/dev/vda', '/dev/nvme0n1', '/dev/tty'):
    try:
        os.close(os.open(device, os.O_RDONLY)); escaped(device)
    except OSError:
        pass
""",
        "root",
    ),
    Attempt(
        "make a device",
        """
import stat
p = {scratch} + '/kmsg'
os.mknod(p, stat.S_IFCHR | 0o666, os.makedev(1, 11)); os.unlink(p); escaped()
""",
        "root",
    ),
    Attempt("signal another process", "os.kill({victim}, 18); escaped()"),
    Attempt(
        "raise a limit",
        """
import resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):
    try:
        resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)); escaped(which)
    except ValueError:
        pass
""",
    ),
    Attempt("core dumps", "import resource\nif resource.getrlimit(resource.RLIMIT_CORE)[1] != 0: escaped()"),
    # -- Exhausting resources (the sandboxes of these tests have 128 MB, 16 processes, 8 MB of disk)
    Attempt("memory of one process", "x = bytearray(b'x') * (200 * 2**20); escaped(len(x))"),
    Attempt(
        "memory of many processes",
        """
children = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        x = bytearray(b'x') * (60 * 2**20); time.sleep(20); os._exit(0)
    children.append(pid)
time.sleep(1.5)
alive = [os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in children]
if sum(alive) == 8: escaped()
for pid in children: os.kill(pid, 9)
""",
    ),
    Attempt(
        "shared memory of many processes",
        """
import mmap
children = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        x = mmap.mmap(-1, 60 * 2**20)
        for _ in range(60): x.write(b'x' * 2**20)
        time.sleep(20); os._exit(0)
    children.append(pid)
time.sleep(1.5)
alive = [os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in children]
if sum(alive) == 8: escaped()
for pid in children: os.kill(pid, 9)
""",
    ),
    Attempt(
        "memory in nameless files",
        """
files = [os.memfd_create(str(n)) for n in range(40)]
for f in files: os.write(f, b'x' * (5 * 2**20))
escaped()
""",
        needs_filters=True,
    ),
    Attempt(
        "memory in System V segments",
        """
libc.shmat.restype = ctypes.c_void_p
total = 0
for n in range(40):
    key = libc.shmget(0, 5 * 2**20, 0o1600)
    if key < 0: break
    where = libc.shmat(key, None, 0)
    ctypes.memset(where, 1, 5 * 2**20); libc.shmdt(ctypes.c_void_p(where)); libc.shmctl(key, 0, None); total += 5
if total == 200: escaped()
""",
        needs_filters=True,
    ),
    Attempt(
        "fill the disk",
        """
total = 0
try:
    for n in range(20):
        with open({scratch} + f'/fill{{n}}', 'wb') as file: total += file.write(b'x' * (2 * 2**20))
except OSError:
    pass
if total > 9 * 2**20: escaped(total)
""",
    ),
    Attempt(
        "fill /dev/shm",
        """
total = 0
try:
    for n in range(20):
        with open(f'/dev/shm/covey-{{n}}', 'wb') as file: total += file.write(b'x' * (2 * 2**20))
except OSError:
    pass
for n in range(20):
    if os.path.exists(f'/dev/shm/covey-{{n}}'): os.unlink(f'/dev/shm/covey-{{n}}')
if total > 9 * 2**20: escaped(total)
""",
    ),
    Attempt(
        "fork without end",
        """
children = []
try:
    for _ in range(60):
        pid = os.fork()
        if pid == 0: time.sleep(20); os._exit(0)
        children.append(pid)
    escaped(len(children))
except OSError:
    pass
for pid in children: os.kill(pid, 9)
""",
    ),
    Attempt(
        "threads without end",
        """
import threading
stop = threading.Event()
try:
    for _ in range(60): threading.Thread(target=stop.wait, daemon=True).start()
    escaped()
except RuntimeError:
    pass
stop.set()
""",
    ),
    Attempt("open files without end", "import resource\nf = [os.open('/dev/null', 0) for _ in range(300)]; escaped()"),
    # -- Known exploits
    Attempt("proxies of the host", "if [n for n in os.environ if 'proxy' in n.lower()]: escaped()"),
    Attempt(
        "the program's own file, for writing", "os.close(os.open('/proc/self/exe', os.O_WRONLY)); escaped()", "never"
    ),
    Attempt(
        "a file through the memory it is mapped to",
        """
import mmap
path = os.__file__
with open(path, 'rb') as file:
    view = mmap.mmap(file.fileno(), 4096, mmap.MAP_SHARED, mmap.PROT_READ)
    before = view[:8]
    where = next(int(line.split('-')[0], 16) for line in open('/proc/self/maps') if line.rstrip().endswith(path))
    with open('/proc/self/mem', 'r+b', buffering=0) as memory:
        memory.seek(where); memory.write(b'ESCAPED!')
    if open(path, 'rb').read(8) != before: escaped()
""",
        "never",
    ),
    Attempt(
        "a descriptor of another process",
        """
other = libc.syscall(434, {victim}, 0)
if other >= 0 and libc.syscall(438, other, 0, 0) >= 0: escaped()
""",
    ),
    Attempt(
        "another process's share of the processor",
        "n = os.getpriority(os.PRIO_PROCESS, {victim}); os.setpriority(os.PRIO_PROCESS, {victim}, n); escaped()",
    ),
    Attempt(
        "a file by its handle",
        """
class Handle(ctypes.Structure):
    _fields_ = [('size', ctypes.c_uint), ('kind', ctypes.c_int), ('bytes', ctypes.c_ubyte * 128)]
handle, mount = Handle(128), ctypes.c_int()
place = os.open('/usr', os.O_RDONLY)
if libc.name_to_handle_at(-100, b'/usr', ctypes.byref(handle), ctypes.byref(mount), 0) == 0:
    if libc.open_by_handle_at(place, ctypes.byref(handle), 0) >= 0: escaped()
""",
        "root",
    ),
    Attempt("mounts by the new calls", "if libc.syscall(430, b'tmpfs', 0) >= 0: escaped()", "root"),
    Attempt(
        "a file larger than the disk, with nothing in it",
        "f = open({scratch} + '/hollow', 'wb'); f.truncate(100 * 2**20); escaped()",
    ),
    Attempt(
        "memory in sockets",
        """
children = []
for _ in range(8):
    pid = os.fork()
    if pid == 0:
        kept = [s for _ in range(110) for s in socket.socketpair()]
        for s in kept:
            s.setblocking(False)
            try:
                while True: s.send(b'x' * 32768)
            except OSError:
                pass
        print('full', flush=True)
        time.sleep(20); os._exit(0)
    children.append(pid)
time.sleep(3)
alive = [os.waitpid(pid, os.WNOHANG)[0] == 0 for pid in children]
if sum(alive) == 8: escaped()
for pid in children: os.kill(pid, 9)
""",
    ),
    Attempt(
        "larger sockets",
        """
a, b = socket.socketpair()
before = a.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**30)
if a.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > before: escaped()
""",
        "maybe",
        needs_filters=True,
    ),
    Attempt("io_uring", "if libc.syscall(425, 4, ctypes.create_string_buffer(120)) >= 0: escaped()", "maybe", True),
    Attempt(
        "watches of files, which are the user's all together", "if libc.inotify_init1(0) >= 0: escaped()", "maybe", True
    ),
    Attempt(
        "page faults at will",
        "if libc.syscall(323 if os.uname().machine == 'x86_64' else 282, 1) >= 0: escaped()",
        "maybe",
        True,
    ),
    Attempt(
        "a program without a name",
        """
f = os.memfd_create('x', 0)
os.write(f, b'#!/bin/sh\\necho ESCAPED\\n')
os.execve(f'/proc/self/fd/{{f}}', ['x'], {{}})
""",
        needs_filters=True,
    ),
    Attempt(
        "a key of its own in the kernel",
        """
number = {{'x86_64': 248, 'aarch64': 217}}[os.uname().machine]
if libc.syscall(number, b'user', b'covey-escape', b'x', 1, -2) > 0: escaped()
""",
        "maybe",
        needs_filters=True,
    ),
    Attempt(
        "the kernel's messages",
        "if libc.klogctl(3, ctypes.create_string_buffer(4096), 4096) > 0: escaped()",
        "root",
        True,
    ),
    Attempt(
        "a program in the kernel",
        """
wish = (ctypes.c_uint32 * 18)(2, 4, 4, 1)
if libc.syscall({{'x86_64': 321, 'aarch64': 280}}[os.uname().machine], 0, wish, 72) >= 0: escaped()
""",
        "maybe",
        needs_filters=True,
    ),
]

# What the tier `limits` does not stop, even with Landlock and seccomp; listed in docs/sandbox.md.
NOT_BY_LIMITS = {"fill the disk", "memory in sockets", "namespaces of the host", "setuid programs"}
