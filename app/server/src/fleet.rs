//! Which models are resident: a bounded number of workers, started on request, the least recently used one ended first,
//! replaced when they die.

use crate::cores::Cores;
use crate::job::{Job, Load, Resident};
use crate::metrics::Metrics;
use crate::worker::link::{Hosting, JobEvents, StartError, Watch, Worker};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use thiserror::Error;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// A model that can be asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelEntry {
    /// Its id in the interface.
    pub id: String,
    /// Its name for people.
    pub display_name: String,
    /// File or directory, for the worker.
    pub path: String,
    /// When it came into the models folder, in seconds since 1970; 0 where unknown.
    pub created: u64,
}

/// What the fleet keeps to.
#[derive(Debug, Clone)]
pub struct FleetOptions {
    /// Models, in the order of `/v1/models`.
    pub models: Vec<ModelEntry>,
    /// Index of the model that is taken when a request names none.
    pub default: usize,
    /// Workers at a time; at least 1.
    pub max_resident: usize,
    /// Jobs that run side by side in one worker.
    pub parallel: u32,
    /// How workers are started.
    pub hosting: Hosting,
    /// Whether models are tried before they are called ready.
    pub self_test: bool,
    /// From the start of a worker until its model is ready.
    pub load_limit: Duration,
    /// Time a worker may be silent, or a running job without a step.
    pub stall_limit: Duration,
}

/// A model is not to be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub(crate) enum FleetError {
    #[error("the model could not be loaded")]
    LoadFailed,
    #[error("the model failed its self-test")]
    SelfTestFailed,
    #[error("the server is shutting down")]
    Closed,
}

/// Why nothing is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    /// Nothing was asked for yet, and nothing is loaded ahead.
    Empty,
    Loading,
    Ready,
    Failed(FleetError),
}

pub(crate) struct Fleet {
    options: FleetOptions,
    slots: Vec<Arc<Slot>>,
    clock: AtomicU64,
    closed: AtomicBool,
    metrics: Arc<Metrics>,
    /// By model, the last failure, until it is made ready.
    failures: Mutex<HashMap<usize, Failure>>,
    cores: Cores,
    this: Weak<Fleet>,
}

struct Slot {
    held: Arc<RwLock<Option<Held>>>,
    claim: Mutex<Claim>,
}

/// What a slot holds or is about to.
struct Claim {
    model: Option<usize>,
    used: u64,
    health: Health,
    /// Workers that were begun to be started here.
    starts: u64,
    /// Workers in a row that died without having finished a job.
    useless: u32,
}

/// How a model could not be made ready.
struct Failure {
    when: Instant,
    why: FleetError,
    /// What the log was told.
    told: String,
}

struct Held {
    model: usize,
    worker: Arc<Worker>,
}

/// A worker that is not ended as long as this is held.
pub(crate) struct Lease {
    worker: Arc<Worker>,
    _held: OwnedRwLockReadGuard<Option<Held>>,
}

impl Lease {
    pub(crate) fn run(&self, job: Job) -> JobEvents {
        self.worker.run(job)
    }

    pub(crate) fn resident(&self) -> &Resident {
        &self.worker.resident
    }
}

const STOP_PATIENCE: Duration = Duration::from_secs(5);
const SHORTEST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// Time in which a model that could not be made ready is not tried again for a request.
const FAILURE_HOLDS: Duration = Duration::from_secs(5);

impl Fleet {
    pub(crate) fn new(options: FleetOptions, metrics: Arc<Metrics>) -> Arc<Self> {
        let slot = || {
            let claim = Claim { model: None, used: 0, health: Health::Empty, starts: 0, useless: 0 };
            Arc::new(Slot { held: Arc::default(), claim: Mutex::new(claim) })
        };
        let slots = (0..options.max_resident.max(1)).map(|_| slot()).collect();
        let (clock, closed) = (AtomicU64::new(0), AtomicBool::new(false));
        let (failures, cores) = (Mutex::default(), Cores::of_this_thread());
        Arc::new_cyclic(|this| Self { options, slots, clock, closed, metrics, failures, cores, this: this.clone() })
    }

    pub(crate) fn models(&self) -> &[ModelEntry] {
        &self.options.models
    }

    pub(crate) fn default_model(&self) -> usize {
        self.options.default
    }

    /// Answers that one worker makes side by side.
    pub(crate) fn parallel(&self) -> u32 {
        self.options.parallel.max(1)
    }

    /// Index of the model called `id`.
    pub(crate) fn find(&self, id: &str) -> Option<usize> {
        self.options.models.iter().position(|model| model.id == id)
    }

    /// Whether a worker is alive and its model has passed its self-test; if not, why.
    pub(crate) fn health(&self) -> Health {
        let mut worst = Health::Empty;
        for slot in &self.slots {
            match (slot.claim().health, worst) {
                (Health::Ready, _) => return Health::Ready,
                (Health::Failed(error), _) => worst = Health::Failed(error),
                (Health::Loading, Health::Empty) => worst = Health::Loading,
                (Health::Loading | Health::Empty, _) => {}
            }
        }
        worst
    }

    /// What is resident now, as far as nobody is changing it.
    pub(crate) fn residents(&self) -> Vec<(String, Resident)> {
        let held = self.slots.iter().filter_map(|slot| slot.held.try_read().ok());
        held.filter_map(|held| {
            let held = held.as_ref().filter(|held| held.worker.is_alive())?;
            Some((self.options.models[held.model].id.clone(), held.worker.resident.clone()))
        })
        .collect()
    }

    /// The worker of `model`, started if it is not resident. A model that has just failed is not tried again: it would cost
    /// another one its place each time.
    pub(crate) async fn lease(&self, model: usize) -> Result<Lease, FleetError> {
        match self.failures().get(&model) {
            Some(failure) if failure.when.elapsed() < FAILURE_HOLDS => return Err(failure.why),
            _ => {}
        }
        self.load(model).await
    }

    async fn load(&self, model: usize) -> Result<Lease, FleetError> {
        let slot = self.slot_for(model);
        if let Ok(held) = Arc::clone(&slot.held).try_read_owned()
            && let Some(lease) = lease(held, model)
        {
            return Ok(lease);
        }
        let this = self.this.upgrade().ok_or(FleetError::Closed)?;
        // On a task of its own, so that a caller that gives up neither throws a half-loaded model away nor leaves a claim to the
        // slot that nobody follows.
        let loading = tokio::spawn(async move {
            let held = Arc::clone(&slot.held).read_owned().await;
            match lease(held, model) {
                Some(lease) => Ok(lease),
                None => this.load_into(&slot, model).await,
            }
        });
        loading.await.unwrap_or(Err(FleetError::LoadFailed))
    }

    /// Keeps trying to have `model` resident, with growing pauses, as long as no other model has taken its place.
    pub(crate) fn prewarm(&self, model: usize) {
        // The task may begin later than the first probe comes.
        if let Some(slot) = self.slots.iter().find(|slot| slot.claim().health == Health::Empty) {
            slot.claim().health = Health::Loading;
        }
        let this = self.this.clone();
        tokio::spawn(async move {
            let mut pause = SHORTEST_PAUSE;
            loop {
                let Some(fleet) = this.upgrade() else { return };
                if !fleet.has_place_for(model) {
                    return;
                }
                match fleet.load(model).await {
                    Ok(_) | Err(FleetError::Closed) => return,
                    Err(_) => drop(fleet),
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        });
    }

    /// Ends all workers.
    pub(crate) async fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for slot in &self.slots {
            // Jobs hold the lock for reading; those that are left at this point are given up.
            let worker = match slot.held.try_read() {
                Ok(held) => held.as_ref().map(|held| Arc::clone(&held.worker)),
                Err(_) => None,
            };
            if let Some(worker) = worker {
                worker.stop(STOP_PATIENCE).await;
            }
        }
    }

    fn failures(&self) -> MutexGuard<'_, HashMap<usize, Failure>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a failure. The log is told once, as long as the reason stays the same.
    fn tell_failure(&self, model: usize, why: FleetError, error: String) {
        let mut failures = self.failures();
        if failures.get(&model).is_none_or(|last| last.told != error) {
            let model = &self.options.models[model].id;
            tracing::error!(%model, %error, "a model could not be made ready; it will be tried again");
        }
        failures.insert(model, Failure { when: Instant::now(), why, told: error });
    }

    /// Whether `model` can be resident without another one going.
    fn has_place_for(&self, model: usize) -> bool {
        self.slots.iter().any(|slot| slot.claim().model.is_none_or(|claimed| claimed == model))
    }

    /// The slot that has the model, or is the next to have it.
    fn slot_for(&self, model: usize) -> Arc<Slot> {
        let now = self.clock.fetch_add(1, Ordering::Relaxed) + 1;
        let claims = |wanted: Option<usize>| self.slots.iter().find(|slot| slot.claim().model == wanted);
        let oldest = || self.slots.iter().min_by_key(|slot| slot.claim().used);
        let slot = claims(Some(model)).or_else(|| claims(None)).or_else(oldest);
        // There is at least one slot.
        let slot = slot.unwrap_or(&self.slots[0]);
        let mut claim = slot.claim();
        claim.model = Some(model);
        claim.used = now;
        drop(claim);
        Arc::clone(slot)
    }

    async fn load_into(self: &Arc<Self>, slot: &Arc<Slot>, model: usize) -> Result<Lease, FleetError> {
        let mut held = Arc::clone(&slot.held).write_owned().await;
        if held.as_ref().is_some_and(|held| held.model == model && held.worker.is_alive()) {
            return lease(OwnedRwLockWriteGuard::downgrade(held), model).ok_or(FleetError::LoadFailed);
        }
        if self.closed.load(Ordering::SeqCst) {
            return Err(FleetError::Closed);
        }
        let start = {
            let mut claim = slot.claim();
            claim.health = Health::Loading;
            claim.starts += 1;
            claim.starts
        };
        let old = held.take();
        if let Some(old) = &old {
            old.worker.stop(STOP_PATIENCE).await;
        }
        let entry = &self.options.models[model];
        let load =
            Load { model: entry.path.clone(), sequences: self.options.parallel, self_test: self.options.self_test };
        let watch = Watch {
            load_limit: self.options.load_limit,
            silence_limit: self.options.stall_limit,
            stall_limit: self.options.stall_limit,
        };
        let worker = match Worker::start(&self.options.hosting, load, watch, self.cores.clone()).await {
            Ok(worker) => Arc::new(worker),
            Err(error) => {
                let why = match &error {
                    StartError::SelfTest(_) => FleetError::SelfTestFailed,
                    _ => FleetError::LoadFailed,
                };
                self.tell_failure(model, why, error.to_string());
                {
                    let mut claim = slot.claim();
                    claim.health = Health::Failed(why);
                    // Somebody may wait for another model here already.
                    claim.model = claim.model.filter(|claimed| *claimed != model);
                }
                // What had to go for nothing comes back.
                if let Some(old) = old.filter(|old| old.model != model) {
                    self.prewarm(old.model);
                }
                return Err(why);
            }
        };
        let resident = &worker.resident;
        tracing::info!(model = %entry.id, route = %resident.route, device = %resident.device, "a model is ready");
        self.failures().remove(&model);
        slot.claim().health = Health::Ready;
        *held = Some(Held { model, worker: Arc::clone(&worker) });
        self.attend(slot, model, start, Arc::clone(&worker));
        lease(OwnedRwLockWriteGuard::downgrade(held), model).ok_or(FleetError::LoadFailed)
    }

    /// Replaces the worker when it dies, unless the slot has begun another one by then.
    fn attend(&self, slot: &Arc<Slot>, model: usize, start: u64, worker: Arc<Worker>) {
        let (this, slot) = (self.this.clone(), Arc::clone(slot));
        tokio::spawn(async move {
            worker.ended().await;
            let Some(fleet) = this.upgrade() else { return };
            if fleet.closed.load(Ordering::SeqCst) || worker.was_told_to_end() {
                return;
            }
            let useless = {
                let mut claim = slot.claim();
                if claim.starts != start || claim.model != Some(model) {
                    return;
                }
                claim.health = Health::Loading;
                claim.useless = if worker.was_of_use() { 0 } else { claim.useless.saturating_add(1) };
                claim.useless
            };
            fleet.metrics.worker_restarts.inc();
            tracing::warn!(model = %fleet.options.models[model].id, "a worker died; it is replaced");
            // One that dies as soon as it is there would keep the machine busy with nothing else.
            if useless > 1 {
                let pause = SHORTEST_PAUSE * 2_u32.pow(useless.min(8) - 2);
                drop(fleet);
                tokio::time::sleep(pause.min(LONGEST_PAUSE)).await;
            }
            if let Some(fleet) = this.upgrade() {
                fleet.prewarm(model);
            }
        });
    }
}

impl Slot {
    fn claim(&self) -> MutexGuard<'_, Claim> {
        self.claim.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lease(held: OwnedRwLockReadGuard<Option<Held>>, model: usize) -> Option<Lease> {
    let worker = held.as_ref().filter(|held| held.model == model && held.worker.is_alive());
    let worker = Arc::clone(&worker?.worker);
    Some(Lease { worker, _held: held })
}
