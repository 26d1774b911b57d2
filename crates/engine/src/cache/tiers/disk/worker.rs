//! Threads that read and write files. One that writes and one that reads: a request does not wait
//! for what others leave behind.

use super::file::{decode, partial, write_file};
use crate::cache::prefix::Key;
use crate::cache::tiers::Entry;
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// What a thread is told to do. Numbers tell apart what concerns the same entry.
pub enum Job {
    Write {
        path: PathBuf,
        /// The file's beginning, up to the payload.
        head: Vec<u8>,
        entry: Entry,
        key: Key,
        number: u64,
    },
    Read {
        path: PathBuf,
        key: Key,
        number: u64,
    },
    Remove(PathBuf),
    Flush(SyncSender<()>),
}

/// What has come of it.
pub enum Answer {
    /// `bytes` wait no more.
    Written { key: Key, number: u64, bytes: usize, failed: bool },
    /// `None` if the file was missing or damaged.
    Read { key: Key, number: u64, entry: Option<Entry> },
}

/// The threads. Each does what it is told in order.
pub struct Workers {
    /// `None` once we end.
    jobs: Option<Jobs>,
    answers: Receiver<Answer>,
    threads: Vec<JoinHandle<()>>,
    patience: Duration,
}

struct Jobs {
    writer: Sender<Job>,
    reader: Sender<Job>,
}

impl Workers {
    /// Starts them, for files of an `identity`. When we end, what they were told is done first,
    /// unless nothing comes of it for as long as `patience`.
    pub fn start(identity: &str, patience: Duration) -> io::Result<Self> {
        let (done, answers) = channel();
        let mut threads = Vec::new();
        let mut start = |name: &str| {
            let (sender, jobs) = channel();
            let (identity, done) = (identity.to_owned(), done.clone());
            let thread = std::thread::Builder::new()
                .name(name.into())
                .spawn(move || work(&identity, &jobs, &done))?;
            threads.push(thread);
            io::Result::Ok(sender)
        };
        let jobs = Jobs { writer: start("prefix-writer")?, reader: start("prefix-reader")? };
        Ok(Self { jobs: Some(jobs), answers, threads, patience })
    }

    /// Tells a thread what to do: the reader to read, the writer everything else. Returns false if
    /// it has ended, which it does only with us.
    pub fn tell(&self, job: Job) -> bool {
        let Some(jobs) = &self.jobs else { return false };
        let thread = if let Job::Read { .. } = job { &jobs.reader } else { &jobs.writer };
        thread.send(job).is_ok()
    }

    /// What has come since the last call.
    pub fn answers(&self) -> impl Iterator<Item = Answer> + '_ {
        self.answers.try_iter()
    }

    /// Waits until everything told so far is done.
    pub fn flush(&self) {
        let threads = self.jobs.iter().flat_map(|jobs| [&jobs.writer, &jobs.reader]);
        let waits: Vec<_> = threads.map(|thread| wait_for(thread, 1)).collect();
        for wait in waits {
            // An error means that the thread is gone, and with it the reason to wait.
            let _ = wait.recv();
        }
    }

    /// Holds a thread back until the returned value is dropped.
    #[cfg(test)]
    pub fn hold(&self, reader: bool) -> Receiver<()> {
        let jobs = self.jobs.as_ref().expect("they run");
        wait_for(if reader { &jobs.reader } else { &jobs.writer }, 0)
    }
}

/// Something is received once a thread has done what it was told. Without room for it, the thread
/// waits until it is.
fn wait_for(thread: &Sender<Job>, room: usize) -> Receiver<()> {
    let (done, wait) = sync_channel(room);
    // It is gone if that fails, and nothing will be received.
    let _ = thread.send(Job::Flush(done));
    wait
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.jobs = None;
        loop {
            match self.answers.recv_timeout(self.patience) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                // The file system hangs, and may do so for ever.
                Err(RecvTimeoutError::Timeout) => return,
            }
        }
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

fn work(identity: &str, jobs: &Receiver<Job>, answers: &Sender<Answer>) {
    for job in jobs {
        // Nobody waits for an answer that cannot be sent.
        match job {
            Job::Write { path, head, entry, key, number } => {
                let partial = partial(&path, std::process::id());
                let written = write_file(&partial, &head, &entry);
                let failed = written.and_then(|()| fs::rename(&partial, &path)).is_err();
                if failed {
                    let _ = fs::remove_file(&partial);
                }
                let bytes = entry.bytes();
                drop(entry);
                let _ = answers.send(Answer::Written { key, number, bytes, failed });
            }
            Job::Read { path, key, number } => {
                let entry = fs::read(&path).ok().and_then(|file| decode(identity, &key, &file));
                let _ = answers.send(Answer::Read { key, number, entry });
            }
            Job::Remove(path) => {
                let _ = fs::remove_file(path);
            }
            Job::Flush(done) => {
                let _ = done.send(());
            }
        }
    }
}
