//! What is asked of the Linux kernel, once for all: process trees, peers of sockets, waits, names and numbers.
//!
//! It knows nothing of workers or jobs, holds no state but what its caller keeps, and decides nothing.
//!
//! - [`process_tree`]: processes that descend from this one, and their end.
//! - [`peer`]: the process at the other end of a socket.
//! - [`descriptors`]: closing descriptors by their numbers.
//! - [`rights`]: sockets to which no descriptors can be passed.
//! - [`listener`]: a TCP listener that ends without a reset.
//! - [`fork`]: a fork that nothing in this process hears of but its caller.
//! - [`folder`]: emptying a folder whose content is not trusted.
//! - [`lifeline`]: a descriptor that ends with the program behind it.
//! - [`landlock`]: the system calls of Landlock.
//! - [`standard_output`]: whether the program was started with one.
//! - [`schedule`]: how long a thread runs before others have their turn.
//! - [`shared_words`]: numbers in memory that another process writes as well.
//! - [`unread`]: what the other side of a socket has not read yet.
//! - [`vfork`]: starting a program without a copy of this process.
//! - [`wait`]: waits for children and descriptors.
//! - [`errno`]: the errors of raw system calls.
//! - [`syscalls`], [`rlimits`], [`signals`]: names and numbers.

pub mod descriptors;
pub mod errno;
pub mod folder;
pub mod fork;
pub mod landlock;
pub mod lifeline;
pub mod listener;
pub mod peer;
pub mod process_tree;
pub mod rights;
pub mod rlimits;
pub mod schedule;
pub mod shared_words;
pub mod signals;
pub mod standard_output;
pub mod syscalls;
pub mod unread;
pub mod vfork;
pub mod wait;
