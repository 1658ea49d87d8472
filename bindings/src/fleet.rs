//! The decision without the router: a fleet that Python tells what happens, and asks. JSON in, no I/O.

use decision::fleet::admission::settings;
use decision::fleet::log::EventSink;
use decision::fleet::prefix::hash::PromptHashes;
use decision::fleet::{Admit, Outcome, Refused, Request, Reservation, Ticket, Usage};
use decision::model::WorkerSpec;
use decision::model::checks::read;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use serde_json::Value;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pyo3::create_exception!(
    router_policies._core,
    NotAdmitted,
    pyo3::exceptions::PyException,
    "The turn is not placed and does not wait: why, and after how many seconds to come again, if ever."
);

/// How often time alone may let somebody in, while somebody waits.
const LOOK: Duration = Duration::from_millis(100);

/// Policies that draw lots draw the same ones each time.
const SEED: u64 = 0;

/// Workers, what is known of them, and who may use their KV.
#[pyclass(frozen)]
pub struct Fleet(Arc<decision::fleet::Fleet>);

fn json(field: &str, text: &str) -> PyResult<Value> {
    let value = serde_json::from_str(text);
    value.map_err(|error| PyValueError::new_err(format!("{field}: {error}")))
}

#[pymethods]
impl Fleet {
    #[new]
    fn new(policy: &str, policy_params: &str, admission: &str) -> PyResult<Self> {
        let params = json("policy_params", policy_params)?;
        let built = decision::policy::build(policy, params).map_err(PyValueError::new_err)?;
        let admission = settings::build(&json("admission", admission)?);
        let admission = admission.map_err(PyValueError::new_err)?;
        let sink = EventSink::in_memory();
        let fleet = decision::fleet::Fleet::new(built, policy.to_owned(), sink, SEED);
        Ok(Self(Arc::new(fleet.with_admission(admission))))
    }

    /// Adds the worker that this JSON describes, and returns its id.
    fn add_worker(&self, worker: &str) -> PyResult<String> {
        let spec: WorkerSpec = read(json("worker", worker)?).map_err(PyValueError::new_err)?;
        let spec = spec
            .with_key_of_environment()
            .and_then(WorkerSpec::normalise);
        let added = spec.and_then(|spec| self.0.add_worker(spec));
        Ok(added.map_err(PyValueError::new_err)?.id.clone())
    }

    /// False where there is no such worker; so below.
    fn set_up(&self, worker: &str, is_up: bool) -> bool {
        self.0.report_health(worker, is_up);
        self.0.health(worker).is_some()
    }

    fn set_draining(&self, worker: &str, is_draining: bool) -> bool {
        self.0.set_draining(worker, is_draining)
    }

    fn remove_worker(&self, worker: &str) -> bool {
        self.0.remove_worker(worker)
    }

    /// Turns that wait.
    fn waiting(&self) -> usize {
        self.0.waiting_turns()
    }

    /// Whether nothing is reserved anywhere.
    fn is_idle(&self) -> bool {
        self.0.is_idle()
    }

    /// Asks for a place for a prompt of token ids.
    fn admit(
        &self,
        tokens: Vec<u32>,
        session: Option<String>,
        max_output_tokens: Option<u64>,
        exclude: Vec<String>,
    ) -> PyResult<Turn> {
        let request = Request {
            session_id: session,
            prompt: PromptHashes::of_tokens(&tokens, self.0.token_block()),
            max_output_tokens,
            stream: true,
            ..Request::default()
        };
        let room = Arc::<Room>::default();
        let wake = Arc::clone(&room);
        let admit = self.0.admit(&request, &exclude, move || wake.open());
        Ok(Turn {
            fleet: Arc::clone(&self.0),
            place: Mutex::new(Place::of(admit)?),
            request,
            exclude,
            room,
        })
    }
}

/// Says that a turn that waits may have a place.
#[derive(Default)]
struct Room(Mutex<bool>, Condvar);

impl Room {
    fn open(&self) {
        *locked(&self.0) = true;
        self.1.notify_all();
    }

    fn wait(&self, time: Duration) {
        let waited = self
            .1
            .wait_timeout_while(locked(&self.0), time, |is_open| !*is_open);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

enum Place {
    Waiting(Ticket),
    Placed(Box<Reservation>),
    Ended,
}

impl Place {
    fn of(admit: Admit) -> PyResult<Self> {
        match admit {
            Admit::Placed(mut reservation) => {
                reservation.streams();
                Ok(Self::Placed(Box::new(reservation)))
            }
            Admit::Waiting(ticket) => Ok(Self::Waiting(ticket)),
            Admit::Refused(refused) => Err(not_admitted(refused)),
        }
    }
}

fn not_admitted(refused: Refused) -> PyErr {
    let (why, retry_after_s) = match refused {
        Refused::ByPolicy(refusal) => (format!("{refusal:?}"), None),
        Refused::QueueFull { retry_after_s } => ("QueueFull".to_owned(), Some(retry_after_s)),
        Refused::NoShare { retry_after_s } => ("NoShare".to_owned(), Some(retry_after_s)),
        Refused::Quota { retry_after_s, .. } => ("Quota".to_owned(), Some(retry_after_s)),
        Refused::WaitedTooLong { retry_after_s } => {
            ("WaitedTooLong".to_owned(), Some(retry_after_s))
        }
    };
    NotAdmitted::new_err((why, retry_after_s))
}

/// A turn that has a place, or waits for one. It gives back what it has when nobody holds it any more.
#[pyclass(frozen)]
pub struct Turn {
    fleet: Arc<decision::fleet::Fleet>,
    request: Request,
    exclude: Vec<String>,
    place: Mutex<Place>,
    room: Arc<Room>,
}

impl Turn {
    /// Whether it has a place by now.
    fn ask(&self) -> PyResult<bool> {
        let mut place = locked(&self.place);
        match std::mem::replace(&mut *place, Place::Ended) {
            Place::Waiting(ticket) => {
                let admit = self
                    .fleet
                    .place_ticket(ticket, &self.request, &self.exclude);
                *place = Place::of(admit)?;
            }
            other => *place = other,
        }
        match &*place {
            Place::Waiting(_) => Ok(false),
            Place::Placed(_) => Ok(true),
            Place::Ended => Err(PyRuntimeError::new_err("the turn has ended")),
        }
    }

    fn with<R>(&self, of: impl FnOnce(&mut Reservation) -> R) -> PyResult<R> {
        match &mut *locked(&self.place) {
            Place::Placed(reservation) => Ok(of(reservation)),
            Place::Waiting(_) => Err(PyRuntimeError::new_err("the turn waits")),
            Place::Ended => Err(PyRuntimeError::new_err("the turn has ended")),
        }
    }

    fn end(&self, outcome: Outcome, status: Option<u16>, error: Option<String>) -> PyResult<()> {
        self.with(|_| ())?;
        if let Place::Placed(reservation) = self.take() {
            reservation.finish(outcome, status, error);
        }
        Ok(())
    }

    fn take(&self) -> Place {
        std::mem::replace(&mut *locked(&self.place), Place::Ended)
    }
}

#[pymethods]
impl Turn {
    /// Waits until the turn has a place; false if it has none after so many seconds. Other threads go on meanwhile.
    #[pyo3(signature = (timeout_s=None))]
    fn wait(&self, py: Python<'_>, timeout_s: Option<f64>) -> PyResult<bool> {
        let begun = Instant::now();
        loop {
            if self.ask()? {
                return Ok(true);
            }
            let left_s = timeout_s.map(|time_s| time_s - begun.elapsed().as_secs_f64());
            if left_s.is_some_and(|left_s| left_s <= 0.0) {
                return Ok(false);
            }
            let time = left_s.map_or(LOOK, |left_s| LOOK.min(Duration::from_secs_f64(left_s)));
            py.detach(|| {
                self.room.wait(time);
                self.fleet.pump();
            });
            py.check_signals()?;
        }
    }

    /// The id and the URL of the worker that answers.
    fn worker(&self) -> PyResult<(String, String)> {
        self.with(|it| (it.answering().id.clone(), it.answering().url.clone()))
    }

    /// Of the worker that prefills for it, where there is one.
    fn prefill(&self) -> PyResult<Option<(String, String)>> {
        let of = |it: &mut Reservation| {
            let prefill = it.prefill()?;
            Some((prefill.id.clone(), prefill.url.clone()))
        };
        self.with(of)
    }

    /// So many more tokens came; the first ends the prefill.
    fn output(&self, tokens: u64) -> PyResult<()> {
        self.with(|it| it.output(tokens))
    }

    /// The answer is whole; what the engine counted, where it says so.
    #[pyo3(signature = (prompt_tokens=None, cached_tokens=None, output_tokens=None))]
    fn finish(
        &self,
        prompt_tokens: Option<u64>,
        cached_tokens: Option<u64>,
        output_tokens: Option<u64>,
    ) -> PyResult<()> {
        let usage = Usage::counted(prompt_tokens, cached_tokens, output_tokens);
        self.with(|it| it.report(usage))?;
        self.end(Outcome::Ok, Some(200), None)
    }

    /// The worker failed.
    fn fail(&self, error: String) -> PyResult<()> {
        self.end(Outcome::WorkerError, None, Some(error))
    }

    /// Nobody wants the answer any more, or the place. Nothing where the turn has ended.
    fn leave(&self) {
        drop(self.take());
    }
}
