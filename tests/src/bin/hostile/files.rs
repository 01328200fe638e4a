//! Attempts to access other users' files, and to bypass path checks.

mod set_id;

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use rustix::fs::{Mode, OFlags};

use crate::calls::{At, Refused, Tried, address, address_mut, call, close};
use crate::{Attempt, INHERITED, Targets};

pub(crate) const ATTEMPTS: &[(&str, Attempt)] = &[
    ("read-shadow", |_| read("/etc/shadow")),
    ("list-root-home", |_| list("/root")),
    ("list-temporary-files", list_temporary_files),
    ("make-shared-memory", make_shared_memory),
    ("read-neighbour", |to| read(to.text("secret")?)),
    ("list-neighbour", |to| list(parent(to.text("secret")?)?)),
    ("read-by-symlink", read_by_symlink),
    ("read-by-hard-link", read_by_hard_link),
    ("read-by-root-link", |to| read(&format!("/proc/self/root{}", to.text("secret")?))),
    ("read-by-parent-root", |to| {
        read(&format!("/proc/{}/root{}", nix::unistd::getppid(), to.text("secret")?))
    }),
    ("read-by-dots", |to| read(&format!("{}{}", "../".repeat(40), to.text("secret")?))),
    ("read-by-handle", read_by_handle),
    ("stat-neighbour", |to| {
        let what = fs::metadata(to.text("secret")?).at("stat another user's file")?;
        Ok(format!("{} bytes", what.len()))
    }),
    ("watch-neighbour", watch_neighbour),
    ("chmod-neighbour", chmod_neighbour),
    ("chmod-configuration", chmod_configuration),
    ("remove-neighbour", |to| {
        // The folder is not empty, so it cannot be removed, but the kernel checks the permission first.
        match fs::remove_dir(parent(to.text("secret")?)?) {
            Err(error) if error.raw_os_error() == Some(libc::ENOTEMPTY) => Ok("it was not empty".into()),
            other => other.map(|()| "removed".into()).at("remove another user's folder"),
        }
    }),
    ("write-outside", |to| unnamed_file(to.text("outside")?)),
    ("write-to-usr", |_| unnamed_file("/usr/share")),
    ("read-shared-memory", |to| read(to.text("shared")?)),
    ("write-beside-own-program", write_beside_own_program),
    ("link-beside-own-program", link_beside_own_program),
    ("write-to-own-program", |_| {
        let program = std::env::current_exe().at("find its own program")?;
        open_for_writing(program.to_str().unwrap_or_default())
    }),
    ("write-to-working-folder", |_| unnamed_file(".")),
    ("read-what-is-given", |to| read(to.text("readable")?)),
    ("write-to-what-is-only-read", |to| open_for_writing(to.text("readable")?)),
    ("truncate-what-is-only-read", truncate_readable),
    ("replace-what-is-only-read", replace_readable),
    ("write-to-what-is-given", |to| write_and_remove(Path::new(to.text("writable")?))),
    ("write-to-own-temporary-folder", |_| write_and_remove(&std::env::temp_dir())),
    ("make-a-device", make_a_device),
    ("give-a-file-away", give_a_file_away),
    ("set-id-by-mode", set_id::by_changing_the_mode),
    ("set-group-id-of-a-folder", set_id::of_a_folder),
    ("set-id-from-the-start", set_id::by_making_a_file),
    ("set-id-past-the-filter", set_id::past_the_filter),
    ("inherited-descriptors", inherited_descriptors),
    ("booby-trap-temporary-folder", booby_trap),
    ("list-temporary-folders", |to| {
        let sibling = parent(to.text("temporary file of sibling")?)?;
        list(sibling.parent().unwrap_or(sibling))
    }),
    ("shut-temporary-folders", |_| shut_temporary_folders()),
    ("read-temporary-file-of-sibling", |to| read(to.text("temporary file of sibling")?)),
    ("write-temporary-file-of-sibling", |to| open_for_writing(to.text("temporary file of sibling")?)),
    ("make-temporary-file-for-sibling", |to| {
        write_and_remove(parent(to.text("temporary file of sibling")?)?)
    }),
];

/// Maximum number of bytes to read. A few bytes are enough to prove access.
const ENOUGH: u64 = 4096;

pub(crate) fn read(path: &str) -> Tried {
    let what = format!("read {path}");
    let mut bytes = Vec::new();
    File::open(path).and_then(|file| file.take(ENOUGH).read_to_end(&mut bytes)).at(&what)?;
    Ok(format!("{} bytes of {path}", bytes.len()))
}

pub(crate) fn list(path: impl AsRef<Path>) -> Tried {
    let path = path.as_ref();
    let entries = fs::read_dir(path).at(&format!("list {}", path.display()))?;
    Ok(format!("{} entries", entries.count()))
}

/// Lists the entries of `/tmp`, except for the parents of paths to which the worker was granted access.
fn list_temporary_files(to: &Targets) -> Tried {
    let given = Path::new(to.text("readable")?);
    let entries = fs::read_dir("/tmp").at("list /tmp")?.flatten();
    match entries.filter(|entry| !given.starts_with(entry.path())).count() {
        0 => Err(Refused::nothing("list /tmp")),
        count => Ok(format!("{count} entries")),
    }
}

/// Removes all permissions from the folder that contains the temporary folders of all programs.
fn shut_temporary_folders() -> Tried {
    let own = std::env::var_os("TMPDIR").ok_or_else(|| Refused::nothing("find its own temporary folder"))?;
    let shared = Path::new(&own).parent().unwrap_or(Path::new(&own));
    fs::set_permissions(shared, fs::Permissions::from_mode(0o000)).at("shut the folder of all programs")?;
    Ok(format!("shut {}", shared.display()))
}

/// Opens a file for writing without writing to it.
pub(crate) fn open_for_writing(path: &str) -> Tried {
    OpenOptions::new().write(true).open(path).at(&format!("open {path} for writing"))?;
    Ok(format!("opened {path}"))
}

fn parent(path: &str) -> Result<&Path, Refused> {
    Path::new(path).parent().ok_or_else(|| Refused::because("NOTARGET", "a path has no parent"))
}

/// Creates an unnamed file, which disappears when it is closed.
fn unnamed_file(folder: &str) -> Tried {
    let mut options = OpenOptions::new();
    let opened = options.write(true).custom_flags(libc::O_TMPFILE).mode(0o600).open(folder);
    opened.at(&format!("make a file in {folder}"))?;
    Ok(format!("made a file in {folder}"))
}

/// Returns a path that no other process uses.
fn fresh(folder: &Path) -> PathBuf {
    folder.join(format!("hostile-{}", std::process::id()))
}

fn write_and_remove(folder: &Path) -> Tried {
    let path = fresh(folder);
    let what = format!("write to {}", folder.display());
    File::create(&path).and_then(|mut file| file.write_all(b"x")).at(&what)?;
    fs::remove_file(&path).at(&what)?;
    Ok("written and removed".into())
}

/// Path of a file that is removed on drop.
struct Gone<'p>(&'p Path);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.0);
    }
}

fn read_by_symlink(to: &Targets) -> Tried {
    let link = fresh(&std::env::temp_dir());
    let _gone = Gone(&link);
    symlink(to.text("secret")?, &link).at("create a symbolic link in its own temporary folder")?;
    fs::read(&link).at("read another user's file through a symbolic link")?;
    Ok("read".into())
}

fn read_by_hard_link(to: &Targets) -> Tried {
    let link = fresh(&std::env::temp_dir());
    let _gone = Gone(&link);
    fs::hard_link(to.text("secret")?, &link).at("link another user's file into its own temporary folder")?;
    fs::read(&link).at("read another user's file through a hard link")?;
    Ok("read".into())
}

/// Opens a file by its handle, as the container escape "shocker" does.
fn read_by_handle(to: &Targets) -> Tried {
    const HANDLE_BYTES: usize = 128;
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        handle: [u8; HANDLE_BYTES],
    }
    let path = CString::new(to.text("secret")?).map_err(|_| Refused::nothing("a path"))?;
    let mut handle = Handle { bytes: HANDLE_BYTES as u32, kind: 0, handle: [0; HANDLE_BYTES] };
    let (mut mount, here) = (0_i32, libc::AT_FDCWD as usize);
    let arguments = [here, path.as_ptr() as usize, address_mut(&mut handle), address_mut(&mut mount), 0];
    call(libc::SYS_name_to_handle_at, arguments).at("get a handle to another user's file")?;
    let opened = call(libc::SYS_open_by_handle_at, [here, address(&handle), libc::O_RDONLY as usize]);
    close(opened.at("open another user's file by its handle")?);
    Ok("opened".into())
}

fn watch_neighbour(to: &Targets) -> Tried {
    let folder = parent(to.text("secret")?)?.to_str().unwrap_or_default();
    let path = CString::new(folder).map_err(|_| Refused::nothing("a path"))?;
    let watch = call(libc::SYS_inotify_init1, [libc::IN_CLOEXEC as usize]).at("make a watch")?;
    let added =
        call(libc::SYS_inotify_add_watch, [watch, path.as_ptr() as usize, libc::IN_ALL_EVENTS as usize]);
    close(watch);
    added.at("watch another user's folder")?;
    Ok("sees when files in the folder are opened and changed".into())
}

/// Sets the mode of a file in another bulkhead to its current value.
fn chmod_neighbour(to: &Targets) -> Tried {
    const SECRET_MODE: u32 = 0o600;
    let permissions = fs::Permissions::from_mode(SECRET_MODE);
    fs::set_permissions(to.text("secret")?, permissions).at("change the mode of another user's file")?;
    Ok("changed".into())
}

/// Sets the mode of the configuration file to its current value.
fn chmod_configuration(to: &Targets) -> Tried {
    const MODE: u32 = 0o644;
    let permissions = fs::Permissions::from_mode(MODE);
    fs::set_permissions(to.text("configuration")?, permissions).at("change the mode of the configuration")?;
    Ok("changed".into())
}

fn write_beside_own_program(_: &Targets) -> Tried {
    let program = std::env::current_exe().at("find its own program")?;
    unnamed_file(parent(program.to_str().unwrap_or_default())?.to_str().unwrap_or_default())
}

/// Creates a symbolic link where another process might look for a program.
fn link_beside_own_program(_: &Targets) -> Tried {
    let program = std::env::current_exe().at("find its own program")?;
    let link = fresh(parent(program.to_str().unwrap_or_default())?);
    let _gone = Gone(&link);
    symlink("/bin/true", &link).at("create a symbolic link beside its own program")?;
    Ok("made and removed".into())
}

/// Truncates a read-only file to its current length.
fn truncate_readable(to: &Targets) -> Tried {
    let path = to.text("readable")?;
    let length = fs::metadata(path).at("stat a read-only file")?.size();
    let path = CString::new(path).map_err(|_| Refused::nothing("a path"))?;
    call(libc::SYS_truncate, [path.as_ptr() as usize, length as usize]).at("truncate a read-only file")?;
    Ok("truncated".into())
}

/// Renames a read-only file and renames it back.
fn replace_readable(to: &Targets) -> Tried {
    let path = to.text("readable")?;
    let aside = format!("{path}.aside");
    fs::rename(path, &aside).and_then(|()| fs::rename(&aside, path)).at("rename a read-only file")?;
    Ok("renamed and renamed back".into())
}

fn make_a_device(_: &Targets) -> Tried {
    /// Device number of `/dev/null`.
    const NULL: usize = 0x103;
    let node = fresh(&std::env::temp_dir());
    let _gone = Gone(&node);
    let path = CString::new(node.to_str().unwrap_or_default()).map_err(|_| Refused::nothing("a path"))?;
    let mode = (libc::S_IFCHR | 0o600) as usize;
    call(libc::SYS_mknodat, [libc::AT_FDCWD as usize, path.as_ptr() as usize, mode, NULL])
        .at("make a device node")?;
    Ok("made and removed".into())
}

fn give_a_file_away(_: &Targets) -> Tried {
    const NOBODY: u32 = 65534;
    let path = fresh(&std::env::temp_dir());
    let _gone = Gone(&path);
    let file = File::create(&path).at("create a file in its own temporary folder")?;
    let own = file.metadata().at("stat it")?.uid();
    let other = if own == NOBODY { 0 } else { NOBODY };
    call(libc::SYS_fchown, [file.as_raw_fd() as usize, other as usize, other as usize])
        .at("give a file to another user")?;
    Ok("given away".into())
}

/// Fills the temporary folder with entries that are hard to remove, or whose removal could affect other files: links to
/// other folders, an inaccessible folder, many files, and folders nested more deeply than descriptor limits and path
/// lengths allow.
fn booby_trap(to: &Targets) -> Tried {
    const FILES: usize = 2000;
    const LEVELS: usize = 1500;
    let what = "fill its own temporary folder with traps";
    let (folder, outside) = (std::env::temp_dir(), to.text("outside")?);
    symlink(outside, folder.join("link")).at(what)?;
    fs::create_dir(folder.join("closed")).at(what)?;
    symlink(outside, folder.join("closed/link")).at(what)?;
    File::create(folder.join("closed/file")).at(what)?;
    fs::create_dir(folder.join("closed/inner")).at(what)?;
    File::create(folder.join("closed/inner/file")).at(what)?;
    fs::set_permissions(folder.join("closed/inner"), fs::Permissions::from_mode(0o000)).at(what)?;
    fs::set_permissions(folder.join("closed"), fs::Permissions::from_mode(0o0)).at(what)?;
    for number in 0..FILES {
        File::create(folder.join(number.to_string())).at(what)?;
    }
    let mut level = rustix::fs::open(&folder, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).at(what)?;
    for _ in 0..LEVELS {
        rustix::fs::mkdirat(&level, "level", Mode::RWXU).at(what)?;
        level =
            rustix::fs::openat(&level, "level", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).at(what)?;
    }
    Ok(folder.to_string_lossy().into_owned())
}

/// Returns the open descriptors, except for the one that this function opens.
pub(crate) fn open_descriptors() -> BTreeSet<i32> {
    let Ok(folder) = fs::read_dir("/proc/self/fd") else { return BTreeSet::new() };
    let open: BTreeSet<i32> =
        folder.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    let is_open =
        |fd: &i32| call(libc::SYS_fcntl, [*fd as usize, libc::F_GETFD as usize]) != Err(Errno::EBADF);
    open.into_iter().filter(is_open).collect()
}

fn inherited_descriptors(_: &Targets) -> Tried {
    let link = std::env::var(bulkhead_shared::worker_protocol::LINK_VARIABLE);
    let link = link.ok().and_then(|text| text.parse().ok());
    let due: BTreeSet<i32> = [0, 1, 2].into_iter().chain(link).collect();
    let inherited = INHERITED.get_or_init(open_descriptors);
    if inherited.is_empty() {
        return Err(Refused::because("NOTARGET", "list its own descriptors"));
    }
    match inherited.difference(&due).collect::<Vec<_>>()[..] {
        [] => Err(Refused::nothing("find a descriptor that is not meant for it")),
        ref extra => Ok(format!("has {extra:?} as well")),
    }
}

/// Leaves shared memory behind where the next worker would find it.
fn make_shared_memory(_: &Targets) -> Tried {
    let what = "make shared memory by name";
    let made = OpenOptions::new().write(true).create_new(true).open("/dev/shm/bulkhead-attempt");
    made.and_then(|file| file.set_len(4096)).at(what)?;
    // `sem_open` gives its semaphores names of this form.
    fs::hard_link("/dev/shm/bulkhead-attempt", "/dev/shm/sem.bulkhead-attempt").at(what)?;
    Ok("made".into())
}
