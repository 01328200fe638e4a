//! A user with subordinate IDs in `/etc/subuid` and `/etc/subgid`, for tests. The files are replaced in a
//! mount namespace, so that the machine's own files do not change.

use std::ops::RangeInclusive;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::machine::{has_layers, has_program, is_root};

/// A user that exists only in a test, with or without subordinate IDs.
#[derive(Clone, Copy, Debug)]
pub struct User {
    /// UID and GID.
    pub uid: u32,
    first: u32,
    has_ids: bool,
}

/// First UID of test users. The subordinate IDs of these users begin at `IDS`. The IDs from `USERS` upwards must not be
/// in use on the machine.
const USERS: u32 = 1_879_000_000;
const IDS: u32 = 1_879_200_000;

/// Number of subordinate IDs per user.
const COUNT: u32 = 100;

/// Layers of confinement that are needed to run workers with subordinate IDs.
pub const LAYERS: &[&str] =
    &["landlock scopes", "seccomp notify", "user namespace", "tree end", "mount_setattr"];

impl User {
    /// Creates a user with subordinate IDs. Prints a note and returns `None` if this is not possible on this machine.
    pub fn with_ids() -> Option<Self> {
        const FILES: [&str; 6] = [
            "/usr/bin/newuidmap",
            "/usr/bin/newgidmap",
            "/usr/bin/setpriv",
            "/usr/bin/unshare",
            "/etc/subuid",
            "/etc/subgid",
        ];
        let can = is_root() && FILES.iter().all(|path| has_program(path)) && has_layers(LAYERS);
        can.then(|| Self::new(true))
    }

    /// Creates a user without subordinate IDs. Prints a note and returns `None` if this is not possible on
    /// this machine.
    pub fn without_ids() -> Option<Self> {
        let can = is_root() && ["/usr/bin/setpriv", "/usr/bin/unshare"].iter().all(|path| has_program(path));
        can.then(|| Self::new(false))
    }

    fn new(has_ids: bool) -> Self {
        static USED: AtomicU32 = AtomicU32::new(0);
        let number = USED.fetch_add(1, Ordering::Relaxed);
        // Test programs that run at the same time need different users.
        let own = std::process::id() % 1000;
        Self { uid: USERS + own * 100 + number, first: IDS + (own * 100 + number) * COUNT, has_ids }
    }

    /// Returns the user's subordinate IDs.
    pub fn ids(&self) -> RangeInclusive<u32> {
        self.first..=self.first + COUNT - 1
    }

    /// Returns a command that runs the program in its arguments as this user, with `home` as the home folder. `more`
    /// contains additional options for `setpriv`.
    pub fn command(&self, home: &Path, more: &[&str]) -> Command {
        let Self { uid, first, has_ids } = self;
        let etc = home.join("etc");
        std::fs::create_dir_all(&etc).expect("a writable folder");
        let users = std::fs::read_to_string("/etc/passwd").expect("a list of users");
        let user = format!("tester:x:{uid}:{uid}::{}:/bin/sh\n", home.display());
        let ids = if *has_ids { format!("tester:{first}:{COUNT}\n") } else { String::new() };
        for (name, text) in [("passwd", user + &users), ("subuid", ids.clone()), ("subgid", ids)] {
            std::fs::write(etc.join(name), text).expect("a writable folder");
        }
        let script = "for file in passwd subuid subgid; do\n\
                      [ -e /etc/$file ] || continue\n\
                      mount --bind \"$0/$file\" /etc/$file || exit 1\n\
                      done\n\
                      exec \"$@\"";
        let mut command = Command::new("/usr/bin/unshare");
        command.args(["--mount", "--propagation", "private", "/bin/sh", "-c", script]).arg(etc);
        command.arg("/usr/bin/setpriv").arg(format!("--reuid={uid}")).arg(format!("--regid={uid}"));
        command.arg("--clear-groups").args(more).env("HOME", home);
        command
    }
}
