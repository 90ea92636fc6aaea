// The model runs on the server that this page came from.
const backend = {
  models: [],
  async request(path, options = {}) {
    const token = sessionStorage.getItem("token");
    const response = await fetch(path, { ...options, headers: token ? { Authorization: `Bearer ${token}` } : {} });
    if (response.status === 401) {
      const given = prompt("This server asks for its token:");
      if (given) {
        sessionStorage.setItem("token", given);
        return this.request(path, options);
      }
    }
    const answer = await response.json().catch(() => ({}));
    if (!response.ok) throw new Error(answer.error || `the server answered ${response.status}`);
    return answer;
  },
  async start() {
    this.models = await this.request("models");
  },
  async classify(picture, model) {
    const query = new URLSearchParams({ top: data.top, model: model.name, ...(model.attention ? { attention: 1 } : {}) });
    const [prediction] = (await this.request(`predict?${query}`, { method: "POST", body: picture })).predictions;
    if (prediction.error) throw new Error(prediction.error);
    return prediction;
  },
};
