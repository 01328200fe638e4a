//! Defines the orders from the supervisor to the keeper, and encodes and decodes them. `client` sends the orders, and
//! `process` executes them. This module checks only the form and size of an order, not whether the order makes sense.

use std::io;

use bincode::{BorrowDecode, Encode};

use super::confinement::Confinement;

/// First command-line argument of a keeper. This argument is not documented for users. A program started with the
/// argument must call [`crate::run_as_keeper`].
pub const KEEPER_ARGUMENT: &str = "__keeper";

/// Environment variables that the service manager sets for the supervisor only. Other processes must not inherit
/// them.
pub(crate) const SERVICE_MANAGER_VARIABLES: [&str; 6] =
    ["NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID"];

/// Maximum size of an order in bytes. The configuration allows 96 KiB for arguments and environment. The rest
/// is for the limits and the paths of a sandbox.
pub const ORDER_BYTES_MAX: usize = 192 * 1024;

/// Number of descriptors sent with [`Order::Spawn`]. These are the link, standard output and standard error.
pub(crate) const SPAWN_DESCRIPTORS: usize = 3;

/// An order to start a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, BorrowDecode)]
pub struct SpawnOrder<'a> {
    /// Spawn number, which identifies the worker in reports. The caller chooses the number and never reuses it.
    pub worker: u64,
    /// Path of the program. The program is not searched for in `PATH`.
    pub program: &'a str,
    /// All arguments, including the program's name as the first one.
    pub arguments: Vec<&'a str>,
    /// The worker's whole environment as `NAME=value`. The worker inherits no other variables.
    pub environment: Vec<&'a str>,
    /// Additional environment variables, each with the path of the file that contains its value. The keeper reads the
    /// files, so that orders do not contain the values.
    pub environment_files: Vec<(&'a str, &'a str)>,
    /// Working directory.
    pub directory: &'a str,
    /// Resource limits, in the order in which they are set.
    pub rlimits: Vec<Rlimit>,
    /// Confinement of the worker.
    pub confinement: Confinement<'a>,
    /// True if the worker is a template, which forks other workers (see [`Keeper::fork`](crate::Keeper::fork)).
    /// Instead of a link, a template has a socket to the keeper.
    pub is_template: bool,
}

/// A resource limit of `setrlimit(2)`. `u64::MAX` means unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub struct Rlimit {
    /// Number of the resource, such as `libc::RLIMIT_AS`.
    pub resource: u32,
    /// Soft limit, which the kernel enforces.
    pub soft: u64,
    /// Hard limit, up to which the process can raise the soft limit.
    pub hard: u64,
}

/// An order from the supervisor. When the supervisor closes the order socket, the keeper exits.
#[derive(Debug, PartialEq, Eq, Encode, BorrowDecode)]
pub(crate) enum Order<'a> {
    /// Starts a worker. Carries three descriptors: the link, standard output and standard error.
    Spawn(Box<SpawnOrder<'a>>),
    /// Makes a template fork a worker. Carries the same descriptors as `Spawn`.
    Fork { worker: u64, template: u64 },
    /// Passes a descriptor of the user namespace for workers with
    /// [`Layers::subordinate_ids`](super::confinement::Layers::subordinate_ids).
    Namespace,
    /// Passes a descriptor that the keeper keeps open until it exits. When the descriptor is closed, the process at the
    /// other end knows that all workers are gone.
    Lifeline,
    /// Kills the worker immediately, or cancels its fork. The keeper ignores the order if the worker has already
    /// exited.
    Kill { worker: u64 },
    /// Samples the stacks of the worker's threads and of its descendants. With `job`, samples only the programs of this
    /// job or, if there are none, all descendants. Sent with the file for the records and, if the worker can write its
    /// stacks as text, the worker's journal.
    Sample { worker: u64, job: Option<&'a str> },
    /// Requests a `Pong` report.
    Ping,
}

impl SpawnOrder<'_> {
    fn texts(&self) -> impl Iterator<Item = &str> {
        let Confinement { programs, read, write, withheld, allow, deny, .. } = &self.confinement;
        let lists = [&self.arguments, &self.environment, programs, read, write, withheld, allow, deny];
        let files = self.environment_files.iter().flat_map(|(name, path)| [*name, *path]);
        [self.program, self.directory].into_iter().chain(lists.into_iter().flatten().copied()).chain(files)
    }

    pub(crate) fn encode(&self) -> io::Result<Vec<u8>> {
        if self.texts().any(|text| text.contains('\0')) {
            return Err(invalid("a path, an argument or an environment variable contains a NUL byte"));
        }
        let bytes = Order::Spawn(Box::new(self.clone())).encode()?;
        if bytes.len() > ORDER_BYTES_MAX {
            return Err(invalid(
                "the total size of the arguments, the environment and the paths of the sandbox is too large",
            ));
        }
        Ok(bytes)
    }
}

/// Returns the encoding of orders, with a limit on the memory that decoding can allocate. In the worst case, each of
/// the [`ORDER_BYTES_MAX`] bytes of an order is decoded as a separate string.
fn coding() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<{ size_of::<&str>() * ORDER_BYTES_MAX }>()
}

impl Order<'_> {
    pub(crate) fn encode(&self) -> io::Result<Vec<u8>> {
        bincode::encode_to_vec(self, coding()).map_err(io::Error::other)
    }

    /// Decodes an order. Returns `None` if the bytes are not an order.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Order<'_>> {
        let (order, used) = bincode::borrow_decode_from_slice(bytes, coding()).ok()?;
        (used == bytes.len()).then_some(order)
    }
}

fn invalid(text: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spawn_order_survives_encoding() {
        let order = SpawnOrder {
            worker: 7,
            program: "/bin/sh",
            directory: "/",
            arguments: vec!["sh"],
            environment: vec!["A=b"],
            environment_files: vec![("S", "/s")],
            rlimits: vec![Rlimit { resource: 9, soft: 1, hard: u64::MAX }],
            confinement: Confinement {
                read: vec!["/a", "/b"],
                deny: vec!["mount"],
                tcp_ports: vec![443],
                ..Confinement::default()
            },
            is_template: false,
        };
        let bytes = order.encode().unwrap();
        assert_eq!(Order::decode(&bytes), Some(Order::Spawn(Box::new(order.clone()))));
        assert_eq!(Order::decode(&[&bytes[..], &[0]].concat()), None);
        for length in 0..bytes.len() {
            assert_eq!(Order::decode(&bytes[..length]), None);
        }
        assert_eq!(Order::decode(&[255; 100]), None);
        assert!(SpawnOrder { arguments: vec!["a\0b"], ..order.clone() }.encode().is_err());
        assert!(SpawnOrder { environment_files: vec![("S", "/\0")], ..order.clone() }.encode().is_err());
        let long = "x".repeat(ORDER_BYTES_MAX);
        assert!(SpawnOrder { arguments: vec![&long], ..order }.encode().is_err());
    }
}
