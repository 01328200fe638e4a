//! Tests that ordinary programs work under the default rules, and that the rules deny everything else. Some tests
//! confine only a thread, because the kernel enforces rules per thread.
#![expect(unsafe_code, reason = "a child, and a filter of system calls, have no safe wrapper here")]

use std::fs;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};

use rustix::io::Errno;
use rustix::process::{Pid, getppid, test_kill_process};
use tempfile::TempDir;

use super::{Rules, Ruleset, abi_version};
use crate::confine::paths::ETC_ENTRIES;
use crate::protocol::confinement::NetworkAccess;

/// Returns true if the kernel supports version `min` of Landlock or later. Otherwise prints a message that the test did
/// not run.
fn has_abi(min: u32) -> bool {
    match abi_version() {
        Ok(abi) if abi >= min => true,
        found => {
            eprintln!("NOT RUN: requires Landlock version {min}, found {found:?}");
            false
        }
    }
}

/// Returns true if the program exists. Otherwise prints a message that the test did not run, and returns false.
fn has_program(path: &str) -> bool {
    let is_there = Path::new(path).exists();
    if !is_there {
        eprintln!("NOT RUN: {path} does not exist");
    }
    is_there
}

/// Runs `task` on a new thread that is confined by these rules.
fn under<T: Send>(rules: &Rules<'_>, task: impl FnOnce() -> T + Send) -> T {
    let ruleset = Ruleset::prepare(rules).unwrap();
    std::thread::scope(|scope| {
        let confined = scope.spawn(|| {
            rustix::thread::set_no_new_privs(true).unwrap();
            ruleset.restrict().unwrap();
            task()
        });
        confined.join().unwrap()
    })
}

/// Returns a command whose process is confined by these rules.
fn confined(mut command: Command, rules: &Rules<'_>) -> Command {
    let ruleset = Ruleset::prepare(rules).unwrap();
    // SAFETY: the child only makes system calls.
    unsafe {
        command.pre_exec(move || {
            rustix::thread::set_no_new_privs(true)?;
            ruleset.restrict().map_err(|_| io::Error::from(io::ErrorKind::PermissionDenied))
        })
    };
    command
}

/// Runs a program with a working directory and a temporary folder, like a worker.
fn run(program: &str, arguments: &[&str]) -> Output {
    let (directory, temporary) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let mut command = Command::new(program);
    command.args(arguments).env_clear().env("PATH", "/usr/bin:/bin");
    command.env("TMPDIR", temporary.path()).current_dir(directory.path());
    let programs = [Path::new(program)];
    let rules = Rules {
        programs: &programs,
        directory: Some(directory.path()),
        temporary: Some(temporary.path()),
        ..Rules::default()
    };
    confined(command, &rules).output().unwrap()
}

fn assert_succeeds(program: &str, arguments: &[&str], expected: &str) {
    if !has_abi(1) || !has_program(program) {
        return;
    }
    let output = run(program, arguments);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program}: {}\n{out}\n{err}", output.status);
    assert_eq!(out.trim(), expected, "{program}: {err}");
    assert_eq!(err, "", "{program} wrote to standard error");
}

fn is_refused<T>(result: io::Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
}

#[test]
fn shell_works_under_landlock_rules() {
    let script = "ls /usr /etc/../bin >/dev/null; id -un >/dev/null; head -c 4 /dev/urandom | wc -c; \
        echo x > $TMPDIR/a; mkdir $TMPDIR/b; mv $TMPDIR/a $TMPDIR/b; cat $TMPDIR/b/a; sleep 9 & kill $!; wait";
    assert_succeeds("/bin/sh", &["-c", script], "4\nx");
}

#[test]
fn python_works_under_landlock_rules() {
    let script = "
import json, threading, subprocess, ssl, tempfile, os, pwd, socket, sqlite3, time, locale, mimetypes, random
assert ssl.create_default_context()
with tempfile.NamedTemporaryFile('w') as file:
    file.write(json.dumps([1])); file.flush()
    assert open(file.name).read() == '[1]'
with tempfile.TemporaryDirectory() as folder:
    sqlite3.connect(folder + '/db').execute('create table t (x)')
thread = threading.Thread(target=lambda: None); thread.start(); thread.join()
assert subprocess.run(['/bin/echo', 'x'], capture_output=True, close_fds=True).stdout == b'x\\n'
assert pwd.getpwuid(0).pw_name and os.cpu_count() and time.localtime() and mimetypes.guess_type('a.png')[0]
assert len(os.listdir('/proc/self/fd')) and open('/proc/meminfo').read() and open(os.devnull, 'w').write('x')
left, right = socket.socketpair(); left.send(b'x'); assert right.recv(1) == b'x'
os.memfd_create('x'); print('fine')";
    assert_succeeds("/usr/bin/python3", &["-c", script], "fine");
}

#[test]
fn node_works_under_landlock_rules() {
    let script = "
const fs = require('fs'), os = require('os'), { Worker } = require('worker_threads');
require('crypto').randomBytes(8); require('tls').createSecureContext(); os.cpus(); os.userInfo();
const folder = fs.mkdtempSync(os.tmpdir() + '/a'); fs.writeFileSync(folder + '/a', 'x');
const child = require('child_process').execFileSync('/bin/echo', ['x']).toString().trim();
new Worker('0', { eval: true }).on('exit', () => console.log(child + fs.readFileSync(folder + '/a')));";
    assert_succeeds("/usr/bin/node", &["-e", script], "xx");
}

#[test]
fn java_works_under_landlock_rules() {
    if has_abi(1) && has_program("/usr/bin/java") {
        let output = run("/usr/bin/java", &["--version"]);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}

#[test]
fn landlock_denies_secrets_and_foreign_folders() {
    if !has_abi(1) {
        return;
    }
    let other = TempDir::new().unwrap();
    fs::write(other.path().join("secret"), "x").unwrap();
    let closed = ["/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh", "/etc/ssl/private", "/etc"];
    let folders = ["/root", "/home", "/var", "/run", "/tmp", "/sys", "/dev", "/dev/shm", "/"];
    let secret = other.path().join("secret");
    under(&Rules::default(), || {
        for path in closed.iter().chain(&folders).map(Path::new).chain([other.path(), &secret]) {
            match fs::File::open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    eprintln!("NOT RUN: {} does not exist", path.display());
                }
                opened => assert!(is_refused(opened), "{} can be opened", path.display()),
            }
        }
        assert!(fs::read("/etc/passwd").is_ok() && fs::read("/etc/hosts").is_ok());
    });
}

#[test]
fn landlock_grants_only_world_readable_files_in_etc() {
    if !has_abi(1) {
        return;
    }
    let secret = ["shadow", "gshadow", "sudoers", "ssh", "ssl", "ssl/private", "pki", "security", "bulkhead"];
    assert!(secret.iter().all(|name| !ETC_ENTRIES.contains(name)));
    let folder = TempDir::new().unwrap();
    let given = |mode: u32| {
        let path = folder.path().join(mode.to_string());
        fs::write(&path, "x").unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        let mut ruleset = super::create(super::ABI::V1, NetworkAccess::All).unwrap();
        let access = super::AccessFs::ReadFile.into();
        let condition = super::Condition::IfWorldReadable;
        super::add(&mut ruleset, &super::Grant { path: path.clone(), access, condition }).unwrap();
        let ruleset = Ruleset {
            descriptor: Option::from(ruleset).unwrap(),
            abi: 1,
            forbidden: super::ForbiddenAction::ListRoot,
            granted: Vec::new(),
        };
        std::thread::spawn(move || {
            rustix::thread::set_no_new_privs(true).unwrap();
            ruleset.restrict().unwrap();
            fs::read(path).is_ok()
        })
        .join()
        .unwrap()
    };
    assert!(given(0o644) && !given(0o640) && !given(0o600));
}

#[test]
fn landlock_allows_writes_only_to_granted_folders() {
    if !has_abi(3) {
        return;
    }
    let (directory, temporary, written) =
        (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
    let (directory, temporary, written) = (directory.path(), temporary.path(), written.path());
    fs::write(directory.join("a"), "x").unwrap();
    let write = [written];
    let rules =
        Rules { directory: Some(directory), write: &write, temporary: Some(temporary), ..Rules::default() };
    under(&rules, || {
        assert_eq!(fs::read(directory.join("a")).unwrap(), b"x");
        assert!(is_refused(fs::write(directory.join("b"), "x")));
        assert!(is_refused(fs::write(directory.join("a"), "y")));
        assert!(is_refused(fs::remove_file(directory.join("a"))));
        assert!(is_refused(fs::rename(directory.join("a"), temporary.join("a"))));
        assert!(is_refused(fs::write("/usr/share/bulkhead-test", "x")));
        assert!(is_refused(fs::write("/proc/self/oom_score_adj", "1000")));
        assert!(is_refused(fs::OpenOptions::new().write(true).open("/dev/urandom")));
        for folder in [temporary, written] {
            fs::write(folder.join("a"), "x").unwrap();
            fs::create_dir(folder.join("b")).unwrap();
            fs::rename(folder.join("a"), folder.join("b/a")).unwrap();
            fs::write(folder.join("b/a"), "").unwrap();
            std::os::unix::fs::symlink("a", folder.join("link")).unwrap();
            fs::remove_dir_all(folder.join("b")).unwrap();
            let (kind, mode) = (rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::RUSR);
            let made = rustix::fs::mknodat(rustix::fs::CWD, folder.join("null"), kind, mode, 0x103);
            assert!(matches!(made, Err(Errno::ACCESS | Errno::PERM)));
        }
        assert!(UnixListener::bind(written.join("socket")).is_ok());
        assert!(is_refused(UnixListener::bind(temporary.join("socket"))));
    });
}

#[test]
fn landlock_never_grants_root_as_working_directory() {
    if !has_abi(1) {
        return;
    }
    let folder = TempDir::new().unwrap();
    let program = folder.path().join("program");
    // Another process copies the program, so that this process never has the file open for writing. A child that
    // another test forks would inherit the descriptor, and the program could not be executed (`ETXTBSY`).
    assert!(Command::new("cp").arg("/bin/true").arg(&program).status().unwrap().success());
    let link_folder = TempDir::new().unwrap();
    let link = link_folder.path().join("program");
    std::os::unix::fs::symlink(&program, &link).unwrap();
    let programs = [link.as_path()];
    let rules = Rules { programs: &programs, directory: Some(Path::new("/")), ..Rules::default() };
    assert!(confined(Command::new(&link), &rules).status().unwrap().success());
    let nothing = Rules { directory: Some(Path::new("/usr/..")), ..Rules::default() };
    assert!(is_refused(confined(Command::new(&program), &nothing).status()));
    under(&nothing, || assert!(is_refused(fs::read_dir("/")) && is_refused(fs::read_dir("/tmp"))));
}

#[test]
fn only_configured_landlock_paths_must_exist() {
    if !has_abi(1) {
        return;
    }
    let folder = TempDir::new().unwrap();
    let gone = folder.path().join("gone");
    let paths = [gone.as_path()];
    for rules in [
        Rules { read: &paths, ..Rules::default() },
        Rules { write: &paths, ..Rules::default() },
        Rules { temporary: Some(&gone), ..Rules::default() },
    ] {
        let failure = Ruleset::prepare(&rules).unwrap_err();
        assert_eq!(failure.errno, Errno::NOENT);
        assert_eq!(failure.attempted, format!("open {} for a Landlock rule", gone.display()));
    }
    let rules = Rules { programs: &paths, directory: Some(&gone), ..Rules::default() };
    assert_eq!(Ruleset::prepare(&rules).unwrap().abi(), abi_version().unwrap());
    // A rule can also be for a single file instead of a folder.
    let file = folder.path().join("file");
    fs::write(&file, "x").unwrap();
    let paths = [file.as_path()];
    let rules = Rules { write: &paths, ..Rules::default() };
    under(&rules, || {
        fs::write(&file, "y").unwrap();
        assert!(is_refused(fs::read_dir(folder.path())));
    });
}

#[test]
fn landlock_denies_tcp_without_network() {
    if !has_abi(4) {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    under(&Rules::default(), || {
        assert!(is_refused(TcpStream::connect(address)));
        assert!(is_refused(TcpListener::bind("127.0.0.1:0")));
    });
    let all = Rules { network: NetworkAccess::All, ..Rules::default() };
    under(&all, || assert!(TcpStream::connect(address).is_ok()));
}

/// Returns a listener on an IPv4 address and one on an IPv6 address, each with its port.
fn listeners() -> Option<([TcpListener; 2], [u16; 2])> {
    let listeners = [TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("[::1]:0").ok()?];
    let ports = [0, 1].map(|index: usize| listeners[index].local_addr().unwrap().port());
    Some((listeners, ports))
}

#[test]
fn landlock_permits_only_the_configured_ports() {
    if !has_abi(4) {
        return;
    }
    let Some(((_permitted, ports), (_refused, others))) = listeners().zip(listeners()) else {
        eprintln!("NOT RUN: this machine has no IPv6");
        return;
    };
    for (tcp_ports, udp) in [(&ports[..], false), (&ports[..], true), (&[], false)] {
        let network = NetworkAccess::Connections { udp };
        under(&Rules { network, tcp_ports, ..Rules::default() }, || {
            let v4 = |port: u16| TcpStream::connect(("127.0.0.1", port));
            let v6 = |port: u16| TcpStream::connect(("::1", port));
            let mapped = |port: u16| TcpStream::connect(("::ffff:127.0.0.1", port));
            let is_permitted = !tcp_ports.is_empty();
            assert_eq!((v4(ports[0]).is_ok(), v6(ports[1]).is_ok()), (is_permitted, is_permitted));
            assert_eq!(mapped(ports[0]).is_ok(), is_permitted);
            assert!(is_refused(v4(others[0])) && is_refused(v6(others[1])) && is_refused(mapped(others[0])));
            assert!(is_refused(TcpListener::bind("127.0.0.1:0")));
            assert!(is_refused(TcpListener::bind(("127.0.0.1", 1))), "a permitted port cannot be bound");
        });
    }
}

/// Tests a socket that another process created and passed to the worker.
#[test]
fn landlock_restricts_sockets_passed_to_the_worker() {
    use rustix::net::{AddressFamily, Ipv4Addr, SocketAddrV4, SocketType, connect, socket};
    if !has_abi(4) {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
    let passed = || socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let (refused, permitted) = (passed(), passed());
    let network = NetworkAccess::Connections { udp: false };
    let other = [port ^ 1];
    under(&Rules { network, tcp_ports: &other, ..Rules::default() }, || {
        assert_eq!(connect(&refused, &address), Err(Errno::ACCESS));
    });
    under(&Rules { network, tcp_ports: &[port], ..Rules::default() }, || {
        assert_eq!(connect(&permitted, &address), Ok(()));
    });
}

/// Tests that the rules also restrict TCP fast open, with which `connect` returns before a connection is established.
#[test]
fn landlock_restricts_tcp_fast_open() {
    if !has_abi(4) {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let network = NetworkAccess::Connections { udp: false };
    under(&Rules { network, ..Rules::default() }, || {
        use rustix::net::{AddressFamily, Ipv4Addr, SocketAddrV4, SocketType, connect, socket};
        use std::os::fd::AsRawFd;
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        let on: libc::c_int = 1;
        // SAFETY: the pointer refers to a local variable of the given size.
        let set = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::IPPROTO_TCP,
                libc::TCP_FASTOPEN_CONNECT,
                (&raw const on).cast(),
                size_of_val(&on) as libc::socklen_t,
            )
        };
        assert_eq!(set, 0);
        let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, address.port());
        assert_eq!(connect(&socket, &address), Err(Errno::ACCESS));
    });
}

#[test]
fn landlock_denies_abstract_sockets_of_other_processes() {
    if !has_abi(6) {
        return;
    }
    let name =
        |of: &str| SocketAddr::from_abstract_name(format!("bulkhead-{of}-{}", std::process::id())).unwrap();
    let (outside, inside) = (name("outside"), name("inside"));
    let _listener = UnixListener::bind_addr(&outside).unwrap();
    under(&Rules { network: NetworkAccess::All, ..Rules::default() }, || {
        assert!(is_refused(UnixStream::connect_addr(&outside)));
        let _own = UnixListener::bind_addr(&inside).unwrap();
        assert!(UnixStream::connect_addr(&inside).is_ok());
    });
}

/// An unconfined process that runs as the same user as the tests.
struct Outsider(Child);

impl Outsider {
    fn start() -> Self {
        Self(Command::new("/bin/sleep").arg("600").spawn().unwrap())
    }
}

impl Drop for Outsider {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn landlock_denies_signals_to_other_processes() {
    if !has_abi(6) {
        return;
    }
    let outsider = Outsider::start();
    let processes = [getppid().unwrap(), Pid::from_child(&outsider.0)];
    let tries = || processes.map(test_kill_process);
    if getppid() == Some(Pid::INIT) || tries() != [Ok(()); 2] {
        eprintln!("NOT RUN: this process cannot signal its parent even without rules");
        return;
    }
    assert_eq!(under(&Rules::default(), tries), [Err(Errno::PERM); 2]);
}

/// Drops all capabilities, as the keeper's child does. Otherwise, CAP_PERFMON or CAP_SYS_ADMIN would let the process
/// read these files even without the right to trace.
fn drop_capabilities() {
    use rustix::thread::{CapabilitySet as Set, CapabilitySets, set_capabilities};
    let (effective, permitted, inheritable) = (Set::empty(), Set::empty(), Set::empty());
    set_capabilities(None, CapabilitySets { effective, permitted, inheritable }).unwrap();
}

/// Tests that granting all of `/proc` is safe, because Landlock protects sensitive files of processes outside the
/// sandbox.
#[test]
fn landlock_protects_other_processes_in_proc() {
    if !has_abi(1) {
        return;
    }
    let outsider = Outsider::start();
    let folder = PathBuf::from(format!("/proc/{}", outsider.0.id()));
    let read = |name: &str| fs::read(folder.join(name)).map(drop);
    let files = ["environ", "maps", "auxv", "io", "stack"];
    let links = ["cwd", "root", "exe"];
    let open = || {
        let mut open: Vec<&str> = files.into_iter().filter(|name| read(name).is_ok()).collect();
        open.extend(links.iter().filter(|name| fs::read_link(folder.join(name)).is_ok()));
        open.extend(fs::File::open(folder.join("mem")).is_ok().then_some("mem"));
        open.extend(fs::read_link(folder.join("fd/0")).is_ok().then_some("fd/0"));
        open
    };
    assert!(["environ", "maps", "cwd", "mem", "fd/0"].iter().all(|name| open().contains(name)));
    under(&Rules::default(), || {
        drop_capabilities();
        assert_eq!(open(), Vec::<&str>::new());
        assert!(
            read("stat").is_ok() && read("cmdline").is_ok(),
            "the documentation says that these files are readable"
        );
        assert!(fs::read("/proc/self/environ").is_ok() && fs::read_link("/proc/self/exe").is_ok());
        let own_child = Command::new("/bin/sleep").arg("600").spawn().map(Outsider).unwrap();
        assert!(fs::read(format!("/proc/{}/environ", own_child.0.id())).is_ok());
    });
}

/// Installs a seccomp filter for the calling thread. Under this filter, `landlock_restrict_self` reports success but
/// has no effect.
fn fake_restrict_self() {
    let instruction = |code: u32, jf, k| libc::sock_filter { code: code as u16, jt: 0, jf, k };
    let number = std::mem::offset_of!(libc::seccomp_data, nr) as u32;
    let program = [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, number),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::SYS_landlock_restrict_self as u32),
        instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO),
        instruction(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    // SAFETY: the pointer refers to a local structure, which describes a program of the given length.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    assert_eq!(result, 0);
}

#[test]
fn unenforced_landlock_rules_are_detected() {
    if !has_abi(1) {
        return;
    }
    let temporary = TempDir::new().unwrap();
    let all = [Path::new("/")];
    let own = Some(temporary.path());
    let cases = [
        Rules::default(),
        Rules { read: &all, temporary: own, ..Rules::default() },
        Rules { write: &all, temporary: own, ..Rules::default() },
        Rules { read: &all, has_own_root: true, ..Rules::default() },
    ];
    for (number, rules) in cases.iter().enumerate() {
        let ruleset = Ruleset::prepare(rules).unwrap();
        let restrict = |pretends: bool| {
            std::thread::scope(|scope| {
                let confined = scope.spawn(|| {
                    drop_capabilities();
                    rustix::thread::set_no_new_privs(true).unwrap();
                    if pretends {
                        fake_restrict_self();
                    }
                    ruleset.restrict()
                });
                confined.join().unwrap()
            })
        };
        assert_eq!(restrict(true), Err(super::RestrictError::NotEnforced), "{number}");
        assert_eq!(restrict(false), Ok(()), "{number}");
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
    }
}
