//! A worker as the server sees it: its process, its socket, its jobs.

use super::frame;
use crate::cores::Cores;
use crate::job::{Job, JobEvent, JobFailure, JobId, Load, Order, Report, Resident};
use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::io::BufReader;
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, oneshot, watch};

/// How a worker is started.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Hosting {
    /// A process: this program with these arguments.
    Process {
        /// File of the program.
        program: std::path::PathBuf,
        /// Its arguments.
        arguments: Vec<std::ffi::OsString>,
    },
    /// A thread of this process, for debugging: what crashes there takes the server with it.
    Thread(InProcess),
}

/// Runs a worker on the given end of a socket pair; called on a thread of its own.
#[derive(Clone)]
pub struct InProcess(pub Arc<dyn Fn(StdUnixStream) + Send + Sync>);

impl std::fmt::Debug for InProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("InProcess")
    }
}

/// Limits that a worker must keep.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watch {
    /// From the start until the model is ready.
    pub(crate) load_limit: Duration,
    /// Time without any sign of life.
    pub(crate) silence_limit: Duration,
    /// Time without a step of a running job.
    pub(crate) stall_limit: Duration,
}

/// A worker could not be started.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum StartError {
    #[error("the worker cannot be started: {0}")]
    Spawn(io::Error),
    #[error("the worker did not load the model within {} s", .0.as_secs())]
    TooSlow(Duration),
    #[error("the worker ended while it loaded the model ({0})")]
    Ended(String),
    #[error("{0}")]
    Load(String),
    #[error("{0}")]
    SelfTest(String),
}

/// A running worker. Dropping it ends the process.
pub(crate) struct Worker {
    pub(crate) resident: Resident,
    orders: mpsc::UnboundedSender<Order>,
    jobs: Arc<Jobs>,
    next_id: AtomicU64,
    gone: watch::Receiver<bool>,
    kill: Mutex<Option<oneshot::Sender<()>>>,
    told_to_end: AtomicBool,
}

/// Events of one job. Dropping it before the end cancels the job.
pub(crate) struct JobEvents {
    id: JobId,
    events: mpsc::UnboundedReceiver<JobEvent>,
    orders: mpsc::UnboundedSender<Order>,
    jobs: Arc<Jobs>,
    ended: bool,
}

impl JobEvents {
    /// The next event; `None` after the last.
    pub(crate) async fn next(&mut self) -> Option<JobEvent> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().await.unwrap_or(JobEvent::Failed(JobFailure::WorkerLost));
        self.ended = matches!(event, JobEvent::Finished | JobEvent::Failed(_));
        Some(event)
    }
}

impl Drop for JobEvents {
    fn drop(&mut self) {
        if !self.ended {
            self.jobs.lock().remove(&self.id);
            // A worker that is gone has nothing to stop.
            let _ = self.orders.send(Order::Cancel { id: self.id });
        }
    }
}

type Senders = HashMap<JobId, mpsc::UnboundedSender<JobEvent>>;

#[derive(Default)]
struct Jobs {
    open: Mutex<Senders>,
    any_finished: AtomicBool,
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, Senders> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give(&self, id: JobId, event: JobEvent) {
        let mut jobs = self.lock();
        let is_last = matches!(event, JobEvent::Finished | JobEvent::Failed(_));
        if event == JobEvent::Finished {
            self.any_finished.store(true, Ordering::Relaxed);
        }
        let sender = if is_last { jobs.remove(&id) } else { jobs.get(&id).cloned() };
        if let Some(sender) = sender {
            // A receiver that is gone has sent a cancellation.
            let _ = sender.send(event);
        }
    }

    fn fail_all(&self) {
        for (_, sender) in self.lock().drain() {
            let _ = sender.send(JobEvent::Failed(JobFailure::WorkerLost));
        }
    }
}

impl Worker {
    /// Starts a worker and waits until its model is ready.
    pub(crate) async fn start(hosting: &Hosting, load: Load, watch: Watch, cores: Cores) -> Result<Self, StartError> {
        let (ours, theirs) = StdUnixStream::pair().map_err(StartError::Spawn)?;
        ours.set_nonblocking(true).map_err(StartError::Spawn)?;
        // A worker computes on the cores that its parent has when it starts it.
        cores.take_all();
        let child = match hosting {
            Hosting::Process { program, arguments } => {
                let mut command = Command::new(program);
                command.args(arguments).stdin(Stdio::from(std::os::fd::OwnedFd::from(theirs)));
                command.stdout(Stdio::null()).kill_on_drop(true);
                Some(command.spawn().map_err(StartError::Spawn)?)
            }
            Hosting::Thread(InProcess(run)) => {
                let run = Arc::clone(run);
                let thread = std::thread::Builder::new().name("worker".to_owned());
                thread.spawn(move || run(theirs)).map_err(StartError::Spawn)?;
                None
            }
        };
        let (reader, mut writer) = UnixStream::from_std(ours).map_err(StartError::Spawn)?.into_split();
        // Length and message of a frame come with one system call, and several frames where they are there.
        let mut reader = BufReader::new(reader);
        let mut process = Process(child);
        let loading = async {
            frame::send(&mut writer, &Order::Load(load)).await?;
            frame::receive::<Report>(&mut reader).await
        };
        let resident = match tokio::time::timeout(watch.load_limit, loading).await {
            Err(_) => return Err(StartError::TooSlow(watch.load_limit)),
            Ok(Ok(Some(Report::Ready(resident)))) => resident,
            Ok(Ok(Some(Report::LoadFailed { message, is_self_test: false }))) => return Err(StartError::Load(message)),
            Ok(Ok(Some(Report::LoadFailed { message, .. }))) => return Err(StartError::SelfTest(message)),
            Ok(Ok(None)) => return Err(StartError::Ended(process.end().await)),
            Ok(Ok(Some(other))) => return Err(StartError::Ended(format!("it reported {other:?} first"))),
            Ok(Err(error)) => return Err(StartError::Ended(format!("{error}; {}", process.end().await))),
        };
        let (orders, order_queue) = mpsc::unbounded_channel();
        let (killer, killed) = oneshot::channel();
        let (gone_sender, gone) = watch_channel();
        let jobs = Arc::new(Jobs::default());
        let life = Life { process, watch, jobs: Arc::clone(&jobs), gone: gone_sender, cores };
        tokio::spawn(life.run(reader, writer, order_queue, orders.clone(), killed));
        let (kill, told_to_end) = (Mutex::new(Some(killer)), AtomicBool::new(false));
        Ok(Self { resident, orders, jobs, next_id: AtomicU64::new(1), gone, kill, told_to_end })
    }

    /// Whether it still runs.
    pub(crate) fn is_alive(&self) -> bool {
        !*self.gone.borrow()
    }

    /// Whether it has finished a job.
    pub(crate) fn was_of_use(&self) -> bool {
        self.jobs.any_finished.load(Ordering::Relaxed)
    }

    /// Whether it ends, or has ended, because it was told to.
    pub(crate) fn was_told_to_end(&self) -> bool {
        self.told_to_end.load(Ordering::SeqCst)
    }

    /// Waits until it has ended.
    pub(crate) async fn ended(&self) {
        // A sender that is gone has ended, too.
        let _ = self.gone.clone().wait_for(|gone| *gone).await;
    }

    /// Hands it a job.
    pub(crate) fn run(&self, job: Job) -> JobEvents {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, events) = mpsc::unbounded_channel();
        self.jobs.lock().insert(id, sender);
        let is_sent = self.is_alive() && self.orders.send(Order::Run { id, job: Box::new(job) }).is_ok();
        // The end of the worker may lie between the two lines above.
        if !is_sent || !self.is_alive() {
            self.jobs.give(id, JobEvent::Failed(JobFailure::WorkerLost));
        }
        JobEvents { id, events, orders: self.orders.clone(), jobs: Arc::clone(&self.jobs), ended: false }
    }

    /// Asks it to end, and ends it when it does not within `patience`.
    pub(crate) async fn stop(&self, patience: Duration) {
        if self.is_alive() {
            self.told_to_end.store(true, Ordering::SeqCst);
        }
        // A worker that is gone needs no order.
        let _ = self.orders.send(Order::Quit);
        if tokio::time::timeout(patience, self.ended()).await.is_err() {
            self.kill();
            self.ended().await;
        }
    }

    /// Ends it at once.
    pub(crate) fn kill(&self) {
        let killer = self.kill.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(killer) = killer {
            // Its life may be over already.
            let _ = killer.send(());
        }
    }
}

fn watch_channel() -> (watch::Sender<bool>, watch::Receiver<bool>) {
    watch::channel(false)
}

/// The process, or nothing for a thread.
struct Process(Option<Child>);

impl Process {
    /// Kills it and says how it ended.
    async fn end(&mut self) -> String {
        let Some(child) = &mut self.0 else { return "the thread has ended".to_owned() };
        // What has ended by itself cannot be killed.
        let _ = child.start_kill();
        match child.wait().await {
            Ok(status) => describe(status),
            Err(error) => format!("its status is unknown: {error}"),
        }
    }

    /// Waits a moment for it to end by itself.
    async fn end_gently(&mut self) -> String {
        const PATIENCE: Duration = Duration::from_millis(500);
        if let Some(child) = &mut self.0
            && let Ok(Ok(status)) = tokio::time::timeout(PATIENCE, child.wait()).await
        {
            return describe(status);
        }
        self.end().await
    }
}

fn describe(status: ExitStatus) -> String {
    status.to_string()
}

/// What goes on as long as the worker lives.
struct Life {
    process: Process,
    watch: Watch,
    jobs: Arc<Jobs>,
    gone: watch::Sender<bool>,
    cores: Cores,
}

impl Life {
    async fn run(
        mut self,
        mut reader: BufReader<OwnedReadHalf>,
        mut writer: OwnedWriteHalf,
        mut order_queue: mpsc::UnboundedReceiver<Order>,
        orders: mpsc::UnboundedSender<Order>,
        killed: oneshot::Receiver<()>,
    ) {
        let sending = async move {
            while let Some(order) = order_queue.recv().await {
                if frame::send(&mut writer, &order).await.is_err() {
                    break;
                }
                if order == Order::Quit {
                    break;
                }
            }
            // The reading side sees the end.
            std::future::pending::<()>().await;
        };
        let (jobs, limits, cores) = (Arc::clone(&self.jobs), self.watch, self.cores.clone());
        let heard = Mutex::new(Instant::now());
        let reading = async {
            loop {
                match frame::receive::<Report>(&mut reader).await {
                    Ok(Some(Report::Event { id, event })) => jobs.give(id, event),
                    Ok(Some(Report::Core { number })) => cores.leave(number),
                    Ok(Some(Report::Pong { stalled_ms: Some(stalled), .. }))
                        if Duration::from_millis(stalled) > limits.stall_limit =>
                    {
                        return format!("no step for {stalled} ms");
                    }
                    Ok(Some(_)) => {}
                    Ok(None) => return String::new(),
                    Err(error) => return error.to_string(),
                }
                *heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            }
        };
        let watching = async {
            let mut number = 0;
            loop {
                tokio::time::sleep((limits.silence_limit / 8).min(Duration::from_secs(1))).await;
                number += 1;
                // The sending side sees the end.
                let _ = orders.send(Order::Ping { number });
                let silence = heard.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
                if silence > limits.silence_limit {
                    return format!("no sign of life for {} ms", silence.as_millis());
                }
            }
        };
        let reason = tokio::select! {
            () = sending => String::new(),
            reason = reading => reason,
            reason = watching => reason,
            _ = killed => "told to".to_owned(),
        };
        let status = if reason.is_empty() { self.process.end_gently().await } else { self.process.end().await };
        tracing::info!(%reason, %status, "a worker has ended");
        self.cores.take_all();
        // First the mark, so that no job is handed over after the last were failed.
        let _ = self.gone.send(true);
        self.jobs.fail_all();
    }
}
