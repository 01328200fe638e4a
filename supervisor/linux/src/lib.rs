//! Wrappers of kernel interfaces, such as process trees, socket peers and waits, and helpers for files and streams. The
//! crates of the supervisor, `worker`, `cli`, `fleet` and `tour` use them. The crate decides nothing about workers,
//! clients or jobs. The only global state is two facts about this process that are determined once: whether
//! standard output was closed when the program started, and which signals are caught.
//!
//! - [`process_tree`]: finds and kills the descendants of this process.
//! - [`peer`]: identifies the process at the other end of a socket.
//! - [`descriptors`]: closes descriptors by number.
//! - [`scm_rights`]: sockets that refuse passed descriptors.
//! - [`packets`]: non-blocking exchange of whole messages with descriptors.
//! - [`listener`]: takes over listeners from a service manager, and closes TCP listeners without connection resets.
//! - [`notify`]: notifies the service manager.
//! - [`fork`]: a fork whose child sends no SIGCHLD.
//! - [`folder`]: empties a folder with untrusted contents.
//! - [`liveness`]: a descriptor that reports the exit of another program.
//! - [`landlock`]: Landlock's system calls.
//! - [`blocking`]: blocking access to inherited streams that can be non-blocking.
//! - [`standard_output`]: detects whether standard output was closed when the program started.
//! - [`output_file`]: checks whether a file can be written.
//! - [`scheduler`]: the scheduler time slice of a thread.
//! - [`secret_file`]: reads files with secrets, and checks their type and mode.
//! - [`runtime_dir`]: the user's folder for sockets.
//! - [`shared_words`]: numbers in memory shared with an untrusted process.
//! - [`unread`]: the number of sent bytes that the peer has not read.
//! - [`vfork`]: starts a program without copying this process.
//! - [`sibling`]: starts a program as a child of this process's parent.
//! - [`wait`]: waits for children and descriptors.
//! - [`errno`]: errors of raw system calls.
//! - [`syscalls`], [`rlimits`], [`signals`]: names and numbers of system calls, resource limits and signals.

pub mod blocking;
pub mod descriptors;
pub mod errno;
pub mod folder;
pub mod landlock;
mod names;
pub mod output_file;
mod processes;
pub mod runtime_dir;
pub mod secret_file;
pub mod shared_words;
mod sockets;
pub mod standard_output;

pub use self::names::{rlimits, signals, syscalls};
pub use self::processes::{fork, liveness, process_tree, scheduler, sibling, vfork, wait};
pub use self::sockets::{listener, notify, packets, peer, scm_rights, unread};
