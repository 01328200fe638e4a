//! Tries each kind of Landlock rule, so that `probe` can report the kinds that this machine supports. A child applies a
//! rule to itself, and then attempts the forbidden action if that does no damage. No worker is confined here.
//! `confine/landlock.rs` creates the rules of workers and tests them again.

use std::os::fd::AsFd;

use bulkhead_linux::landlock::{HandledAccess, abi_version, create_ruleset, restrict_self};
use landlock::{AccessFs, AccessNet, Scope};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, Ipv4Addr, SocketAddrV4, SocketType};

use super::child::{self, TrialError};
use super::error_text;
use crate::protocol::LayerSupport;

/// A kind of Landlock rule to try, and the action that the rule forbids.
struct Feature {
    layer: &'static str,
    /// Version of Landlock that introduced the feature.
    since: u32,
    what_to_do: &'static str,
    handled: HandledAccess,
    /// Action that the rule forbids. Fails with the error `refusal` if the kernel enforces the rule, and succeeds
    /// otherwise.
    forbidden: fn() -> Result<(), Errno>,
    refusal: Errno,
}

const NOTHING: HandledAccess = HandledAccess { files: 0, network: 0, scopes: 0 };

fn features() -> [Feature; 5] {
    let files = |right: AccessFs| HandledAccess { files: right as u64, ..NOTHING };
    let tcp = AccessNet::BindTcp as u64 | AccessNet::ConnectTcp as u64;
    let scopes = Scope::Signal as u64 | Scope::AbstractUnixSocket as u64;
    [
        Feature {
            layer: "landlock",
            since: 1,
            what_to_do: "run kernel 5.13 or later with Landlock, and list `landlock` in the `lsm=` boot parameter",
            handled: files(AccessFs::ReadDir),
            forbidden: list_root,
            refusal: Errno::ACCESS,
        },
        Feature {
            layer: "landlock truncate",
            since: 3,
            what_to_do: "run kernel 6.2 or later; until then, seccomp is used instead",
            handled: files(AccessFs::Truncate),
            forbidden: untestable,
            refusal: Errno::ACCESS,
        },
        Feature {
            layer: "landlock tcp",
            since: 4,
            what_to_do: "run kernel 6.7 or later; until then, seccomp is used instead unless `network` sets `tcp_ports`",
            handled: HandledAccess { network: tcp, ..NOTHING },
            forbidden: bind_tcp,
            refusal: Errno::ACCESS,
        },
        Feature {
            layer: "landlock scopes",
            since: 6,
            what_to_do: "run kernel 6.12 or later; until then, a separate user for each worker or a pid namespace is used instead",
            handled: HandledAccess { scopes, ..NOTHING },
            forbidden: signal_parent,
            refusal: Errno::PERM,
        },
        Feature {
            layer: "landlock unix sockets",
            since: 9,
            what_to_do: "run kernel 7.1 or later; until then, seccomp is used instead",
            handled: files(AccessFs::ResolveUnix),
            forbidden: untestable,
            refusal: Errno::ACCESS,
        },
    ]
}

/// Reason and advice for a Landlock call that fails with `EPERM`. The probe sets no_new_privs, and then the kernel
/// itself never returns this error. The cause is therefore a filter, and a newer kernel would not help.
const FILTERED: &str = "a seccomp filter that this process inherited rejects Landlock's system calls";
const FILTER_ADVICE: &str = "allow landlock_create_ruleset, landlock_add_rule and landlock_restrict_self in that \
                             filter: the seccomp profile of the container (deploy/seccomp.json allows them), or \
                             SystemCallFilter= of the unit";

pub(super) fn probe() -> Vec<LayerSupport> {
    let abi = abi_version();
    let support = |feature: &Feature| {
        let tried = match abi {
            Ok(abi) if abi < feature.since => {
                let why = format!("version {abi} is too old, version {} is required", feature.since);
                return LayerSupport::of(feature.layer, Err(why), feature.what_to_do);
            }
            Ok(abi) => feature.tried(abi).map(|()| Some(format!("version {abi}"))),
            Err(errno) => Err(errno.into()),
        };
        match tried {
            Err(TrialError::Errno(errno @ Errno::PERM)) => {
                let why = format!("{}: {FILTERED}", error_text(errno));
                LayerSupport::of(feature.layer, Err(why), FILTER_ADVICE)
            }
            tried => {
                LayerSupport::of(feature.layer, tried.map_err(TrialError::error_text), feature.what_to_do)
            }
        }
    };
    features().iter().map(support).collect()
}

impl Feature {
    fn tried(&self, abi: u32) -> Result<(), TrialError> {
        let ruleset = create_ruleset(self.handled)?;
        child::run_trial(|| {
            child::limit_run_time();
            rustix::thread::set_no_new_privs(true)?;
            let worked_before = (self.forbidden)().is_ok();
            restrict_self(ruleset.as_fd(), abi)?;
            if worked_before && (self.forbidden)() != Err(self.refusal) {
                Err(TrialError::NotEnforced)
            } else {
                Ok(())
            }
        })
    }
}

fn list_root() -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(c"/", flags, Mode::empty()).map(drop)
}

fn bind_tcp() -> Result<(), Errno> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?;
    rustix::net::bind(&socket, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0))
}

fn signal_parent() -> Result<(), Errno> {
    let parent = rustix::process::getppid().ok_or(Errno::SRCH)?;
    rustix::process::test_kill_process(parent)
}

/// Stands in for a forbidden action that would do damage if it succeeded.
fn untestable() -> Result<(), Errno> {
    Err(Errno::NOSYS)
}
