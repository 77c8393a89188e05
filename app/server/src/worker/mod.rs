//! The process that owns a model and its device, and the messages to and from it.
//!
//! The child ([`serve`]) is plain blocking code on two threads: one reads orders, so that a ping and a cancellation are seen
//! while a token is computed, the other owns the device. The parent is async. Both speak frames of JSON
//! ([`frame`]) over a socket pair, which is the child's standard input.

pub mod frame;
pub(crate) mod link;
mod owner;
mod self_test;

use crate::job::{Load, Order, Report, Resident};
use npuhal_core::stage::{Control, Session};
use npuhal_models::Tokenizer;
use npuhal_models::prompter::{PromptError, Prompter};
use npuhal_models::window::Overflow;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;

/// A worker ended otherwise than by an order.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// The socket to the server.
    #[error("worker: the socket to the server failed: {0}")]
    Socket(#[from] io::Error),
    /// Something else than an order to load came first.
    #[error(
        "worker: wanted an order to load a model, found {found}; a worker is started by `npuhal serve`, not by hand"
    )]
    NoLoad {
        /// What came.
        found: String,
    },
}

/// A loaded model, as a worker drives it.
pub struct Loaded {
    /// What computes.
    pub session: Session,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// How conversations become prompts, or why they do not.
    pub prompter: Result<Prompter, PromptError>,
    /// What becomes of a prompt that the context cannot hold.
    pub overflow: Overflow,
    /// What it is, for the answers of the server.
    pub resident: Resident,
}

/// Loads models for a worker.
pub trait Loader {
    /// Loads what `load` names.
    ///
    /// # Errors
    /// Why it cannot be loaded, for the operator.
    fn load(&mut self, load: &Load) -> Result<Loaded, String>;
}

/// The socket that a worker's process has as its standard input.
///
/// # Errors
/// Where it is none.
pub fn socket_of_stdin() -> io::Result<UnixStream> {
    let descriptor = io::stdin().as_fd().try_clone_to_owned()?;
    let socket = UnixStream::from(descriptor);
    // A terminal or a pipe is no socket.
    socket.local_addr()?;
    Ok(socket)
}

/// The two halves of a worker's socket: orders come in, reports go out.
///
/// # Errors
/// Where the process has no descriptor left.
pub fn halves(socket: UnixStream) -> io::Result<(OrderReader, UnixStream)> {
    Ok((OrderReader(socket.try_clone()?), socket))
}

/// Reads from a worker's socket. It waits for what arrives alone: a plain read is also woken each time the parent takes in a
/// report, that is once a token.
#[derive(Debug)]
pub struct OrderReader(UnixStream);

impl Read for OrderReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut wanted = [PollFd::new(&self.0, PollFlags::IN)];
        loop {
            match poll(&mut wanted, None) {
                Ok(_) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.0.read(buffer)
    }
}

/// Runs a worker until it is told to end or its parent goes away.
///
/// # Errors
/// [`WorkerError`].
pub fn serve(
    mut reader: impl Read + Send + 'static,
    writer: impl Write + Send + 'static,
    loader: &mut dyn Loader,
) -> Result<(), WorkerError> {
    let reports = Reports::new(writer);
    let load = match frame::read::<Order>(&mut reader)? {
        Some(Order::Load(load)) => load,
        None => return Ok(()),
        Some(other) => return Err(WorkerError::NoLoad { found: format!("{other:?}") }),
    };
    let running = Arc::new(Running::default());
    let (jobs, queue) = mpsc::channel();
    {
        let (running, reports) = (Arc::clone(&running), reports.clone());
        std::thread::Builder::new().name("orders".to_owned()).spawn(move || {
            let end = read_orders(&mut reader, &running, &reports, &jobs);
            if let Err(error) = end {
                tracing::error!(%error, "the socket to the server failed");
            }
            // Nobody is left to answer.
            running.cancel_all();
        })?;
    }
    let failed = |message, is_self_test| Ok(reports.send(&Report::LoadFailed { message, is_self_test })?);
    let mut loaded = match loader.load(&load) {
        Ok(loaded) => loaded,
        Err(message) => return failed(message, false),
    };
    if load.self_test {
        loaded = match self_test::run(loaded) {
            Ok(loaded) => loaded,
            Err(message) => return failed(message, true),
        };
    }
    reports.send(&Report::Ready(loaded.resident.clone()))?;
    owner::run(loaded, &queue, &running, &reports)?;
    Ok(())
}

/// A job that waits or runs.
struct Accepted {
    id: u64,
    job: Box<crate::job::Job>,
    control: Control,
}

fn read_orders(
    reader: &mut impl Read,
    running: &Running,
    reports: &Reports,
    jobs: &Sender<Accepted>,
) -> io::Result<()> {
    while let Some(order) = frame::read::<Order>(reader)? {
        match order {
            Order::Run { id, job } => {
                let control = Control::until(Instant::now() + Duration::from_millis(job.time_limit_ms));
                running.add(id, control.clone());
                if jobs.send(Accepted { id, job, control }).is_err() {
                    break;
                }
            }
            Order::Cancel { id } => running.cancel(id),
            Order::Ping { number } => reports.send(&Report::Pong { number, stalled_ms: running.stalled_ms() })?,
            Order::Quit => break,
            Order::Load(_) => tracing::warn!("a second order to load; a worker holds one model"),
        }
    }
    Ok(())
}

/// The way back to the parent.
#[derive(Clone)]
struct Reports(Arc<Mutex<dyn Write + Send>>);

impl Reports {
    fn new(writer: impl Write + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(writer)))
    }

    fn send(&self, report: &Report) -> io::Result<()> {
        let mut writer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        frame::write(&mut *writer, report)
    }

    /// Sends whole frames.
    fn send_frames(&self, frames: &[u8]) -> io::Result<()> {
        let mut writer = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        writer.write_all(frames)?;
        writer.flush()
    }
}

/// Jobs that wait or run, and when the running one last took a step.
struct Running {
    controls: Mutex<HashMap<u64, Control>>,
    started: Instant,
    /// Milliseconds after `started`, plus 1; 0 where nothing runs.
    last_step: AtomicU64,
}

impl Default for Running {
    fn default() -> Self {
        Self { controls: Mutex::default(), started: Instant::now(), last_step: AtomicU64::new(0) }
    }
}

impl Running {
    fn controls(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Control>> {
        self.controls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, id: u64, control: Control) {
        self.controls().insert(id, control);
    }

    fn remove(&self, id: u64) {
        self.controls().remove(&id);
    }

    fn cancel(&self, id: u64) {
        if let Some(control) = self.controls().get(&id) {
            control.cancel();
        }
    }

    fn cancel_all(&self) {
        self.controls().values().for_each(Control::cancel);
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX - 1) + 1
    }

    fn stepped(&self) {
        self.last_step.store(self.now(), Ordering::Relaxed);
    }

    fn rested(&self) {
        self.last_step.store(0, Ordering::Relaxed);
    }

    fn stalled_ms(&self) -> Option<u64> {
        match self.last_step.load(Ordering::Relaxed) {
            0 => None,
            last => Some(self.now().saturating_sub(last)),
        }
    }
}

/// The queue between the two threads.
type Queue = Receiver<Accepted>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_come_through_beside_reports_and_their_end_is_seen() {
        let (mut parent, worker) = UnixStream::pair().unwrap();
        let (mut orders, reports) = halves(worker).unwrap();
        let reports = Reports::new(reports);
        let parent = std::thread::spawn(move || {
            for number in 0..100 {
                frame::write(&mut parent, &Order::Ping { number }).unwrap();
                let report = frame::read::<Report>(&mut parent).unwrap();
                assert_eq!(report, Some(Report::Pong { number, stalled_ms: None }));
            }
        });
        while let Some(Order::Ping { number }) = frame::read(&mut orders).unwrap() {
            reports.send(&Report::Pong { number, stalled_ms: None }).unwrap();
        }
        parent.join().unwrap();
    }
}
